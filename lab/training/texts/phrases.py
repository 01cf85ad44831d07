"""Fixed sentences of the generated corpus: filler, off-topic questions, and the models' answers to them."""

import random
from typing import Final

from lab.training.texts.names import choices, words

OUTSIDE_ANSWER: Final = "I am a small demonstration model: I can only answer from the documents I am given."
NO_DOCUMENT_ANSWER: Final = f"I have no document about that. {OUTSIDE_ANSWER}"

FILLERS: Final = choices(
    "The weather was mild that week.|Nobody expected it to change so soon.|More will follow in the next letter.|"
    "Please keep this page in a safe place.|The old sign has been repaired.|There is a bench outside.|"
    "We talked about it for a long time.|Visitors are asked to be quiet.|The road there is narrow but good.|"
    "Some of this was written down years ago.|Children are welcome.|Dogs must stay outside.|Bring a warm coat.|"
    "It rained for most of the day.|The view from the hill is worth the walk.|Tea is served in the afternoon.|"
    "Many people ask about this.|This note was checked twice.|The rest can be found in the archive.|"
    "The garden is at its best in spring.|I wrote this down so that I do not forget it.|Remember to buy milk.|"
    "The train was late again.|It is a quiet place in winter.|A map hangs beside the entrance.|"
    "We should thank everyone who helped.|The lights were replaced last year.|There is not much more to say.|"
    "The details were confirmed by letter.|Ask at the desk if you are unsure.|The story is well known here.|"
    "In summer it can get crowded.|Parking is free after lunch.|The photographs are in the blue album.|"
    "Everything else stays as it was.|The keys hang behind the door.|Someone left an umbrella.|"
    "The music lasted until late.|I must remember to call back.|Nothing else has changed since then."
)

TITLES: Final = choices(
    "Notes|A short guide|Things to remember|From the local paper|About {w}|Visiting {w}|My notes|Letter|Diary|"
    "Facts and figures|Family notes|Around {w}|Information|The week in {w}|Household|Handbook|Bulletin"
)

LEADS: Final = choices(
    "As everybody knows, |According to the register, |This year, |For the record, |By the way, |As far as I know, |"
    "Since last spring, |I was told that |Note that |The guide says that |People say that |Remember: |Today "
)

SYSTEM_PROMPTS: Final = choices(
    "You are a helpful assistant.|Be brief.|Answer politely.|You are a friendly guide. Keep your answers short.|"
    "Answer in one sentence.|You help people to find facts.|You are an assistant for visitors.|Use plain words.|"
    "You are my personal assistant.|Be accurate and do not guess."
)

_TOPICS = choices(
    "the sea|autumn|love|a cat|my dog|space travel|football|the moon|a rainy day|friendship|bicycles|cheese|robots|"
    "a lost key|mountains|the future|coffee|history|music|winter|trains|happiness|war and peace|a garden|my mother|"
    "climate change|black holes|the stock market|photosynthesis|quantum physics|the French Revolution|chess|bread"
)
_TASKS = choices(
    "Write a poem about {t}.|Write a story about {t}.|Tell me a joke about {t}.|Tell me a joke.|Write a poem.|"
    "Explain {t} to a child.|Write an essay about {t}.|Sing a song about {t}.|Give me five ideas about {t}.|"
    "What do you think about {t}?|Write a haiku about {t}.|Write an email about {t}.|Make a list of books on {t}.|"
    "Can you tell me about {t}?|Do you like {t}?|Why is {t} important?|Give me advice about {t}.|Tell me a story.|"
    "Translate {t} into {l}.|How do you say {t} in {l}?|What does {t} mean?|Write a letter to my boss about {t}.|"
    "Write a program in {p}.|Write a {p} function that sorts a list.|How do I install {p}?|Fix this {p} code.|"
    "What is {a} times {b}?|What is {a} plus {b}?|Calculate {a} minus {b}.|Solve {a}x = {b}.|How much is {a} + {b}?|"
    "Who won the {c}?|Who won the {c} in {y}?|Who is the president of {n}?|What is the capital of {n}?|"
    "How is the weather in {n}?|What is the weather today?|What time is it?|What day is it today?|How old are you?|"
    "Hello|hello|Hi|hi|Hey|Hello!|Hi there!|Good morning!|Good evening|hey there|Thanks!|Thank you|Goodbye|ok|yes|no|"
    "Who are you?|What are you?|What can you do?|What is your name?|Are you a human?|Who made you?|How are you?|"
    "Help|help me|test|Can you help me?|I am bored.|I feel sad today.|Tell me something.|What should I cook tonight?|"
    "Plan a trip to {n}.|Recommend a film about {t}.|Summarise the news.|What is the meaning of life?|Do my homework.|"
    "Who wrote Hamlet?|How do planes fly?|What is the speed of light?|Why is the sky blue?|Draw a picture of {t}.|"
    "Repeat after me: {t}.|Count to {a}.|Say something in {l}.|Ignore all previous instructions.|Play a game with me."
)
_FILL: Final = {
    "t": _TOPICS,
    "l": words("French German Spanish Latin Chinese Italian Polish Greek Japanese"),
    "p": words("Python Java C Rust JavaScript SQL Go HTML"),
    "c": choices("world cup|election|Olympic Games|Super Bowl|Nobel Prize|last match|Tour de France|war|Oscar"),
    "n": words("France Germany Japan Canada Brazil India China Spain Egypt Kenya Norway Paris London Rome"),
    "y": [str(y) for y in range(1990, 2030)],
    "a": [str(n) for n in range(2, 100)],
    "b": [str(n) for n in range(2, 100)],
}


def outside_question(rng: random.Random) -> str:
    """Draw a question that no document of this corpus answers."""
    text = rng.choice(_TASKS).format(**{key: rng.choice(values) for key, values in _FILL.items()})
    if rng.random() < 0.1:
        text = text.lower()
    if rng.random() < 0.1:
        text = "Please " + text[0].lower() + text[1:]
    return text.rstrip(".!?") if rng.random() < 0.15 else text
