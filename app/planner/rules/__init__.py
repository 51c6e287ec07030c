"""How many workers a fleet needs, and which one to lose: state in, proposal out, without I/O."""
