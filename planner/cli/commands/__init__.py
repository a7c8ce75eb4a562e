"""The commands, in files named as they are typed."""
