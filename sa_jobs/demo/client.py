"""The shop's customers: threads that place orders over HTTP."""

from __future__ import annotations

import http.client
import itertools
import json
import threading
import time

CUSTOMERS = 4
ORDERS_PER_SECOND = 30
# Every tenth card is declined, after the shop has enqueued the receipt.
DECLINED_EVERY = 10
ANSWER_SECONDS = 30


class Client:
    """Places `orders` orders at a steady pace, and remembers what the shop answered."""

    def __init__(self, port: int, orders: int) -> None:
        self.orders = orders
        self.accepted: list[int] = []
        self.declined: list[int] = []
        self.errors: list[str] = []
        self._port = port
        self._numbers = itertools.count()
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._place_orders, name=f"customer-{number}", daemon=True)
            for number in range(CUSTOMERS)
        ]

    def start(self) -> None:
        """Begin to place orders."""
        self._started_at = time.monotonic()
        for thread in self._threads:
            thread.start()

    @property
    def placed(self) -> int:
        """How many orders the shop has answered."""
        return len(self.accepted) + len(self.declined) + len(self.errors)

    @property
    def is_done(self) -> bool:
        """Whether all orders are placed."""
        return self.placed >= self.orders

    def stop(self) -> None:
        """Place no more orders."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(ANSWER_SECONDS)

    def _place_orders(self) -> None:
        while True:
            number = next(self._numbers)
            due = self._started_at + number / ORDERS_PER_SECOND
            if number >= self.orders or self._stopped.wait(max(0.0, due - time.monotonic())):
                return
            try:
                self._place(number)
            except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
                self.errors.append(f"order {number}: {type(error).__name__}: {error}")

    def _place(self, number: int) -> None:
        declined = number % DECLINED_EVERY == DECLINED_EVERY - 1
        order = {
            "customer": f"customer-{number % 7}",
            "cents": 100 + number,
            "card": "declined" if declined else "good",
        }
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_SECONDS)
        try:
            connection.request(
                "POST", "/orders", json.dumps(order), {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            body = response.read()
        finally:
            connection.close()
        if response.status != (402 if declined else 201):
            raise ValueError(f"the shop answered {response.status}")
        (self.declined if declined else self.accepted).append(json.loads(body)["order_id"])
