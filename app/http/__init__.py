"""What routers and workers share of serving HTTP."""
