"""What building and testing Lily need beside the library."""
