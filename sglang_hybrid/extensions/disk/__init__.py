"""Objects in files of the disk tier."""
