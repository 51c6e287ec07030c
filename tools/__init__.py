"""Commands that write documents and files of the project; no part of the package."""
