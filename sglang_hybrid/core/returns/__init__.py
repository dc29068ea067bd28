"""What came back and when, and so how likely a return is."""
