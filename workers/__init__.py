"""Worker agents and the engines they host."""
