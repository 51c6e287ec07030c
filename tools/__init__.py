"""What writes documents and files of the project; no part of the package."""
