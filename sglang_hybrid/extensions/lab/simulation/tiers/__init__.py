"""The simulated cache with host and disk below the device."""
