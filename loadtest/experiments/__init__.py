"""Questions asked in virtual time: a file of rows each, with traces, settings and columns."""
