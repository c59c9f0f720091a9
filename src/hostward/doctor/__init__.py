"""`hostward doctor`: what of this machine, process and environment gets in the way, and what a log complains of."""
