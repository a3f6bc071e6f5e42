"""What the tests stand on: real servers, never stand-ins for them."""
