"""Read facts and measure rates of this machine for `hostward doctor` and `hostward bench machine`."""
