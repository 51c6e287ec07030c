"""What the console shows: the same answers for its page, its JSON and `kvroute top`."""
