"""A small shop on FastAPI: an order and the job that confirms it commit in one transaction."""
