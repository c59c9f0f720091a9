"""`hostward verify`: train with and without offloading and compare every bit."""
