"""A gateway's endpoint picker: it says where requests go, and the gateway carries them."""
