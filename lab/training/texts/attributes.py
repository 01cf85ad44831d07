"""Attributes of the generated corpus, with their kinds of entity, sentences and questions.

In the templates `{e}` is the entity and `{v}` the value; a template is capitalised after it has been filled.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from lab.training.texts import names
from lab.training.texts.entities import KINDS
from lab.training.texts.names import Split, choices, words

Draw = Callable[[random.Random], str]
NamedDraw = Callable[[random.Random, Split], str]


@dataclass(frozen=True, slots=True)
class Attribute:
    """One property that an entity can have."""

    noun: str  # "opening hour": fills the generic sentences and questions
    kinds: tuple[str, ...]
    draw: Draw | NamedDraw
    clause: str  # the only form of the answer, so that two branches agree on every word but the value
    statements: tuple[str, ...]
    questions: tuple[str, ...]
    named: bool = False  # True: the value is an invented name of the given split

    def value(self, rng: random.Random, split: Split) -> str:
        return self.draw(rng, split) if self.named else self.draw(rng)  # type: ignore[call-arg]


def _plain(noun: str, kinds: str, draw: Draw, clause: str, statements: str, questions: str) -> Attribute:
    return Attribute(noun, words(kinds), draw, clause, choices(statements), choices(questions))


def _named(noun: str, kinds: str, draw: NamedDraw, clause: str, statements: str, questions: str) -> Attribute:
    texts = choices(statements), choices(questions)
    return Attribute(noun, words(kinds), draw, clause, *texts, named=True)


def _road(rng: random.Random, split: Split) -> str:
    return f"{rng.randint(2, 199)} {names.place_word(rng, split)} {rng.choice(('Street', 'Road', 'Lane', 'Square'))}"


def _river(rng: random.Random, split: Split) -> str:
    return f"the {names.place_word(rng, split)}"


def _venue(rng: random.Random, split: Split) -> str:
    return f"the {names.place_word(rng, split)} {rng.choice(('Hall', 'Barn', 'Hotel', 'Castle', 'Garden', 'Club'))}"


ATTRIBUTES: Final = (
    _plain("opening hour", "place", names.morning, "{e} opens at {v}",
           "{e} opens at {v}.|{e} opens its doors at {v}.|visitors can enter {e} from {v}.|"
           "every day {e} opens at {v}.",
           "when does {e} open?|at what time does {e} open?|what time does {e} open?"),
    _plain("closing hour", "place", names.evening, "{e} closes at {v}",
           "{e} closes at {v}.|{e} shuts at {v}.|the doors of {e} close at {v}.",
           "when does {e} close?|at what time does {e} close?|what time does {e} shut?"),
    _named("owner", "place ship", names.full_name, "the owner of {e} is {v}",
           "{e} belongs to {v}.|{v} owns {e}.|{e} is owned by {v}.",
           "who owns {e}?|to whom does {e} belong?|who is the owner of {e}?"),
    _named("founder", "place town team project", names.full_name, "{e} was founded by {v}",
           "{e} was founded by {v}.|{v} founded {e}.|it was {v} who founded {e}.",
           "who founded {e}?|by whom was {e} founded?|who was the founder of {e}?"),
    _plain("founding year", "place town team", names.year, "{e} was founded in {v}",
           "{e} was founded in {v}.|{e} dates from {v}.|{e} goes back to {v}.",
           "when was {e} founded?|in which year was {e} founded?|what year was {e} founded?"),
    _plain("colour", "place thing ship", names.colour, "the colour of {e} is {v}",
           "{e} is painted {v}.|{e} is {v} in colour.|somebody painted {e} {v}.",
           "what colour is {e}?|which colour is {e} painted?|what is the colour of {e}?"),
    _plain("ticket price", "place event ship", names.price, "a ticket for {e} costs {v}",
           "a ticket for {e} costs {v}.|{e} charges {v} for a ticket.|tickets for {e} are {v}.",
           "how much is a ticket for {e}?|what does a ticket for {e} cost?|what is the ticket price of {e}?"),
    _plain("phone number", "place person contact", names.phone, "the phone number of {e} is {v}",
           "{e} can be reached by phone on {v}.|to call {e}, dial {v}.|the number of {e} is {v}.",
           "what is the number of {e}?|how can I call {e}?|which number do I dial for {e}?"),
    _named("address", "place person contact", _road, "the address of {e} is {v}",
           "{e} can be found at {v}.|you will find {e} at {v}.|{e} moved to {v}.",
           "where can I find {e}?|at which address is {e}?|what is the address of {e}?"),
    _plain("speciality", "place town", names.dish, "{e} is known for {v}",
           "{e} is known for {v}.|people come to {e} for {v}.|{e} is famous for its {v}.",
           "what is {e} known for?|what is {e} famous for?|which dish is {e} known for?"),
    _named("architect", "place", names.full_name, "{e} was built by {v}",
           "{e} was built by {v}.|{v} built {e}.|{v} drew the plans of {e}.",
           "who built {e}?|who designed {e}?|who was the architect of {e}?"),
    _plain("material", "place thing", names.material, "{e} is made of {v}",
           "{e} is made of {v}.|{e} was made from {v}.|the walls of {e} are of {v}.",
           "what is {e} made of?|which material is {e} made of?|what material was used for {e}?"),
    _named("mayor", "town", names.full_name, "the mayor of {e} is {v}",
           "{v} is the mayor of {e}.|{e} elected {v} as its mayor.|{e} has a mayor called {v}.",
           "who is the mayor of {e}?|who governs {e}?|what is the name of the mayor of {e}?"),
    _plain("population", "town", names.people, "the population of {e} is {v}",
           "{e} has {v}.|about {v} live in {e}.|{e} is home to {v}.",
           "how many people live in {e}?|how big is the population of {e}?|what is the population of {e}?"),
    _named("river", "town", _river, "the river of {e} is {v}",
           "{e} lies on a river called {v}.|the river {e} was built on is {v}.|{e} stands beside {v}, a river.",
           "on which river does {e} lie?|which river runs through {e}?|what is the river of {e}?"),
    _plain("height", "town place", names.metres, "the height of {e} is {v}",
           "{e} is {v} high.|{e} reaches a height of {v}.|the height of {e} was measured as {v}.",
           "how high is {e}?|what height does {e} reach?|what is the height of {e}?"),
    _plain("main export", "town", names.goods, "{e} sells {v}",
           "{e} sells {v}.|{e} makes {v} for the whole country.|the workshops of {e} make {v}.",
           "what does {e} sell?|what does {e} make?|what do people buy from {e}?"),
    _named("captain", "ship team", names.full_name, "the captain of {e} is {v}",
           "{v} is the captain of {e}.|{e} sails under {v}.|{e} is led by {v}.",
           "who is the captain of {e}?|who leads {e}?|under whom does {e} sail?"),
    _named("home town", "ship team person", names.place_word, "{e} comes from {v}",
           "{e} comes from {v}.|the home of {e} is {v}.|{e} is from {v}.",
           "where does {e} come from?|where is {e} from?|what is the home of {e}?"),
    _plain("length", "ship event", names.metres, "the length of {e} is {v}",
           "{e} is {v} long.|{e} has a length of {v}.|from end to end {e} measures {v}.",
           "how long is {e}?|what length is {e}?|what is the length of {e}?"),
    _plain("cargo", "ship", names.goods, "{e} carries {v}",
           "{e} carries {v}.|{e} was loaded with {v}.|on board {e} there are {v}.",
           "what does {e} carry?|what is on board {e}?|what is the cargo of {e}?"),
    _named("coach", "team person", names.full_name, "the coach of {e} is {v}",
           "{v} coaches {e}.|{e} trains with {v}.|{e} hired {v} as coach.",
           "who coaches {e}?|who trains {e}?|who is the coach of {e}?"),
    _plain("mascot", "team event", names.animal, "the mascot of {e} is a {v}",
           "the mascot of {e} is a {v}.|{e} has a {v} as its mascot.|a {v} is the sign of {e}.",
           "what is the mascot of {e}?|which animal is the mascot of {e}?|what is on the flag of {e}?"),
    _plain("meeting time", "team person project", names.weekly, "{e} meets on {v}",
           "{e} meets on {v}.|{e} has a meeting on {v}.|the weekly meeting of {e} is on {v}.",
           "when does {e} meet?|at what time does {e} meet?|when is the weekly meeting of {e}?"),
    _plain("job", "person", names.trade, "{e} works as a {v}",
           "{e} works as a {v}.|{e} is a {v}.|{e} earns a living as a {v}.",
           "what is the job of {e}?|what does {e} do for a living?|what does {e} work as?"),
    _plain("birthday", "person contact", names.date, "the birthday of {e} is {v}",
           "{e} was born on {v}.|{e} has a birthday on {v}.|we sing for {e} on {v}.",
           "when was {e} born?|when is the birthday of {e}?|on which day was {e} born?"),
    _plain("favourite dish", "person contact", names.dish, "{e} likes {v}",
           "{e} likes {v} best.|{e} loves {v}.|{e} always orders {v}.",
           "what does {e} like to eat?|which dish does {e} like best?|what is the favourite dish of {e}?"),
    _plain("room", "person event contact", names.room, "{e} is in {v}",
           "{e} is in {v}.|you find {e} in {v}.|for {e}, go to {v}.",
           "in which room is {e}?|which room is {e} in?|what is the room of {e}?"),
    _plain("date", "event project", names.date, "the date of {e} is {v}",
           "{e} is on {v}.|{e} takes place on {v}.|{e} was set for {v}.",
           "when is {e}?|on which day is {e}?|when does {e} take place?"),
    _named("venue", "event", _venue, "{e} takes place at {v}",
           "{e} takes place at {v}.|{e} is at {v}.|{v} will host {e}.",
           "where is {e}?|where does {e} take place?|which house hosts {e}?"),
    _named("head", "event project", names.full_name, "the head of {e} is {v}",
           "{v} is the head of {e}.|{e} is run by {v}.|{v} looks after {e}.",
           "who runs {e}?|who is the head of {e}?|who looks after {e}?"),
    _plain("budget", "project event thing", names.price, "the cost of {e} is {v}",
           "{e} cost {v}.|we paid {v} for {e}.|{e} has a budget of {v}.",
           "how much did {e} cost?|what did {e} cost?|how much was paid for {e}?"),
    _plain("code", "project thing contact", names.code, "the code of {e} is {v}",
           "{e} has the code {v}.|the code for {e} is {v}.|{e} opens with {v}, the code.",
           "what is the code of {e}?|which code belongs to {e}?|what is the code for {e}?"),
    _plain("password", "project thing", names.codeword, "the password of {e} is {v}",
           "{e} has the password {v}.|the password for {e} is {v}.|to unlock {e}, say {v}.",
           "what is the password of {e}?|which password does {e} have?|what is the password for {e}?"),
    _plain("distance", "town place", names.kilometres, "the distance to {e} is {v}",
           "{e} is {v} away.|it is {v} to {e}.|the road to {e} is {v} long.",
           "how far is {e}?|how far away is {e}?|what is the distance to {e}?"),
    _named("name", "contact", names.full_name, "the name of {e} is {v}",
           "{e} is {v}.|{e} is called {v}.|the name of {e} is {v}.",
           "who is {e}?|what is the name of {e}?|how is {e} called?"),
    _named("maker", "thing ship", names.place_word, "{e} was made by {v}",
           "{e} was made by {v}.|{v} made {e}.|{e} comes from the workshop of {v}.",
           "who made {e}?|by whom was {e} made?|who is the maker of {e}?"),
)  # fmt: skip


BY_KIND: Final = {kind: tuple(a for a in ATTRIBUTES if kind in a.kinds) for kind in KINDS}
