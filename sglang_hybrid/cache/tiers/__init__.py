"""Host memory below the device: what is copied there and loaded from there, and when."""
