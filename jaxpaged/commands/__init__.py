"""The commands of `jaxpaged` on the command line, a file each, and what they share."""
