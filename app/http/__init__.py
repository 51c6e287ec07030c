"""HTTP serving that routers and workers share."""
