"""Metal on Linux: checks .metal files, and compiles them for a simulator. README.md tells how."""
