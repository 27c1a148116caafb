"""Speed against the bare PyTorch loop; see README.md beside this file."""
