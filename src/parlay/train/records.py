"""Made-up records: a paragraph that states them, and the JSON object that a reader would fill from it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

Value = Callable[[random.Random], str | int | float]


def words(text: str) -> list[str]:
    """The items of a comma-separated list."""
    return text.split(", ")


FIRST = words(
    "Anna, Ben, Clara, David, Elena, Farid, Grace, Hugo, Irene, Jonas, Karim, Laura, Marta, Nils, Olga, Pedro, Rosa, "
    "Samir, Tara, Viktor"
)
LAST = words(
    "Adler, Brown, Costa, Dupont, Evans, Fischer, Garcia, Hansen, Ito, Jones, Keller, Lopez, Martin, Novak, Olsen, "
    "Park, Rossi, Silva, Weber"
)
CITIES = words(
    "Paris, Berlin, Madrid, Oslo, Lisbon, Vienna, Prague, Dublin, Rome, Boston, Denver, Kyoto, Cairo, Lima, Quito, "
    "Leeds, Zurich"
)
ITEMS = words(
    "lamp, chair, desk, kettle, jacket, backpack, notebook, bicycle, camera, guitar, teapot, blanket, mirror, printer, "
    "scarf"
)
COLOURS = words("red, green, blue, black, white, yellow, brown, grey, purple, orange")
MONTHS = words("January, February, March, April, May, June, July, August, September, October, November, December")
JOBS = words("nurse, teacher, plumber, engineer, painter, farmer, lawyer, baker, pilot, editor, chemist, driver")
TEAMS = words("sales, research, support, design, finance, legal, operations, marketing")
DISHES = words("tomato soup, fish pie, green salad, apple cake, rice bowl, lamb stew, mushroom pasta, onion tart")


def one_of(values: list[str]) -> Value:
    """A generator of one of ``values``."""
    return lambda rng: rng.choice(values)


def between(low: int, high: int) -> Value:
    """A generator of whole numbers."""
    return lambda rng: rng.randint(low, high)


def price(rng: random.Random) -> float:
    """An amount with cents."""
    return rng.randint(100, 99999) / 100


def person(rng: random.Random) -> str:
    """A full name."""
    return f"{rng.choice(FIRST)} {rng.choice(LAST)}"


def day(rng: random.Random) -> str:
    """A date in words."""
    return f"{rng.randint(1, 28)} {rng.choice(MONTHS)} {rng.randint(1990, 2030)}"


def meeting(rng: random.Random) -> str:
    """What a team calls its meeting."""
    return f"{rng.choice(TEAMS)} meeting"


def salary(rng: random.Random) -> int:
    """A yearly salary in round thousands."""
    return rng.randint(20, 150) * 1000


def mail(rng: random.Random) -> str:
    """An e-mail address."""
    return f"{rng.choice(FIRST).lower()}.{rng.choice(LAST).lower()}{rng.randint(1, 99)}@example.com"


@dataclass(frozen=True, slots=True)
class Schema:
    """Fields with their generators, and sentences that state all of them."""

    fields: dict[str, Value]
    sentences: tuple[str, ...]


SCHEMAS = (
    Schema(
        {"name": person, "age": between(18, 90), "city": one_of(CITIES), "job": one_of(JOBS)},
        (
            "{name} is {age} years old, lives in {city} and works as a {job}.",
            "I met {name}, a {job} from {city}. Next month is a birthday: until then the age is {age}.",
            "At {age}, {name} has moved to {city} to work as a {job}.",
        ),
    ),
    Schema(
        {
            "item": one_of(ITEMS),
            "colour": one_of(COLOURS),
            "quantity": between(1, 60),
            "price": price,
        },
        (
            "Please send {quantity} of the {colour} {item}. The price is {price} each.",
            "Our shop sells a {colour} {item} for {price}. There are {quantity} left.",
            "The order lists the {item}, colour {colour}, quantity {quantity}, at {price}.",
        ),
    ),
    Schema(
        {"title": meeting, "date": day, "room": between(100, 999), "host": person},
        (
            "The {title} takes place on {date} in room {room}; {host} is the host.",
            "{host} invites you to the {title} on {date}. Come to room {room}.",
            "Room {room} is booked by {host} on {date} for the {title}.",
        ),
    ),
    Schema(
        {"order_id": between(10000, 99999), "customer": person, "email": mail, "date": day},
        (
            "Order {order_id} was placed by {customer} ({email}) on {date}.",
            "On {date}, {customer} wrote from {email} about order {order_id}.",
            "Customer {customer}, mail {email}: order {order_id}, {date}.",
        ),
    ),
    Schema(
        {"from": one_of(CITIES), "to": one_of(CITIES), "date": day, "passengers": between(1, 9)},
        (
            "I need a flight from {from} to {to} on {date} for {passengers} people.",
            "We are {passengers} and want to go to {to}, leaving {from} on {date}.",
            "Book {passengers} seats on the train that leaves {from} for {to} on {date}.",
        ),
    ),
    Schema(
        {"dish": one_of(DISHES), "minutes": between(5, 180), "serves": between(1, 12), "cook": person},
        (
            "{cook} makes {dish} in {minutes} minutes. It serves {serves}.",
            "The recipe for {dish} is by {cook}. It takes {minutes} minutes and is enough for {serves}.",
        ),
    ),
    Schema(
        {"employee": person, "team": one_of(TEAMS), "start": day, "salary": salary, "manager": person},
        (
            "{employee} joins the {team} team on {start} with a salary of {salary}. The manager is {manager}.",
            "From {start}, {manager} of {team} will be joined by {employee}, who earns {salary}.",
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class Record:
    """A filled schema and the sentence that states it."""

    values: dict[str, str | int | float]
    sentence: str

    def dump(self, keys: list[str]) -> str:
        """JSON of ``keys``, in that order."""
        return json.dumps({key: self.values[key] for key in keys})


def make_record(rng: random.Random) -> Record:
    """A random record."""
    schema = rng.choice(SCHEMAS)
    values = {key: make(rng) for key, make in schema.fields.items()}
    return Record(values, rng.choice(schema.sentences).format(**values))
