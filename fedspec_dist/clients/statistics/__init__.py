"""What servers' methods may ask of clients besides their training, one kind a file; see `base`."""
