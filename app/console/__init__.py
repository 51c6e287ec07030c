"""The console: a page for operators, and its answers as JSON."""
