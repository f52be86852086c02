"""What stands behind the commands: library functions that return values and print nothing."""
