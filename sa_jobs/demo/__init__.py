"""A small shop with real processes around a queue, what `sa-jobs demo` runs.

`shop` is an application as users write it; `server` serves it over HTTP. `client` places orders,
`processes` and `postgres` start what runs, `report` reads the numbers and checks them, `display`
shows them, and `run` is the course of events.
"""
