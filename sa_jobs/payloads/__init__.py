"""Typed payloads: a handler's annotations say which Python values its JSON payload stands for.

`PayloadTypes` turns the payload of one handler into JSON and back, parameter by parameter; a
`Codec` does so for the values of one type.

The conversion is msgspec's, and pydantic's for its models. What is ours is the promise: at enqueue
a value is turned into JSON and back again, and `difference` compares the two. What would come back
as something else is refused, with its place and never with the value itself.
"""

from sa_jobs.payloads.slots import Parameter
from sa_jobs.payloads.types import PayloadTypes

__all__ = ["Parameter", "PayloadTypes"]
