"""Train with and without offloading and compare every bit, as `hostward verify`."""
