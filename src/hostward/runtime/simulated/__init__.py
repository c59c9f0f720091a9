"""The backend that plays a GPU on the CPU, with the latest legal order and a race detector."""
