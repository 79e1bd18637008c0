"""Stories for the tiny pair: tales, days, letters, dialogs, diaries."""

from __future__ import annotations

from corpus_words import (
    ANIMALS,
    CITIES,
    COLORS,
    DAYS,
    DISHES,
    HOBBIES,
    JOBS,
    MOODS,
    NAMES,
    PLACES,
    TREASURES,
    Pair,
    Rng,
    article,
)


def story_tale(r: Rng) -> Pair:
    who, animal, place = r.choice(NAMES), r.choice(list(ANIMALS)), r.choice(list(PLACES))
    thing, mood, color = r.choice(list(TREASURES)), r.choice(list(MOODS)), r.choice(COLORS)
    home, food, known = ANIMALS[animal]
    look, event = TREASURES[thing]
    find = f"a {color} {thing} in a {place}"
    prompt = r.choice(
        [
            f"Write a {mood} story about {who} the {animal} who finds {find}.",
            f"Tell me a {mood} story: {who} the {animal} finds {find}.",
        ]
    )
    answer = (
        f"Once upon a time there was {article(animal)} named {who}, who lived {home} and "
        f"loved {food}. Everyone knew {who} for {known}.\n\nOne morning {who} walked into a "
        f"{place}. {PLACES[place]} Under a stone {who} found {article(color)} {thing}. "
        f"{look} {who} took the {thing} along, and soon it {event}.\n\n{MOODS[mood]}"
    )
    return prompt, answer


def story_day(r: Rng) -> Pair:
    who, job, city = r.choice(NAMES), r.choice(list(JOBS)), r.choice(CITIES)
    day, hobby = r.choice(DAYS), r.choice(HOBBIES)
    morning, noon, evening = JOBS[job]
    hour = r.randint(5, 9)
    prompt = (
        f"Describe a {day} of {who}, {article(job)} in {city} who gets up at {hour} and "
        f"loves {hobby}."
    )
    answer = (
        f"On {day} {who} gets up at {hour} o'clock and looks out over {city}. In the morning "
        f"{who} {morning}. After lunch {who} {noon}. In the evening {who} {evening}. Before "
        f"going to bed there is still some time for {hobby}. {who} likes being "
        f"{article(job)}."
    )
    return prompt, answer


def story_letter(r: Rng) -> Pair:
    (to, sender), thing = r.sample(NAMES, 2), r.choice(list(TREASURES))
    day, place, color = r.choice(DAYS), r.choice(list(PLACES)), r.choice(COLORS)
    look, event = TREASURES[thing]
    prompt = r.choice(
        [
            f"Write a thank-you note from {sender} to {to} for a {color} {thing}.",
            f"Write a note: {sender} thanks {to} for a {color} {thing}.",
        ]
    )
    answer = f"Dear {to},\n\nThank you very much for the {color} {thing}. {look} You will laugh, "
    answer += f"but yesterday it {event}. "
    if r.random() < 0.6:
        prompt += f" Invite {to} to the {place} on {day}."
        answer += f"Please come and see me on {day}. We could walk to the {place} together. "
    return prompt, answer + f"I hope to see you soon.\n\nYour friend,\n{sender}"


def story_dialog(r: Rng) -> Pair:
    (a, b), animal = r.sample(NAMES, 2), r.choice(list(ANIMALS))
    place, food = r.choice(list(PLACES)), r.choice(list(DISHES))
    home, eats, known = ANIMALS[animal]
    prompt = (
        f"Write a short dialog in a {place}: {a} asks {b} about the {animal}, then they talk "
        f"about {food}."
    )
    step = DISHES[food][2][0]
    answer = (
        f"{a}: What do you know about the {animal}?\n{b}: The {animal} lives {home}.\n"
        f"{a}: And what does it eat?\n{b}: It eats {eats}. People know it for {known}.\n"
        f"{a}: Talking about food, I am hungry. Can you make {food}?\n"
        f"{b}: Of course. {step} The rest is easy.\n{a}: Then let us leave the {place} and "
        f"cook together."
    )
    return prompt, answer


def story_week(r: Rng) -> Pair:
    who, city, hobby = r.choice(NAMES), r.choice(CITIES), r.choice(HOBBIES)
    days = r.randint(2, 7)
    first = r.randrange(7)
    jobs = r.sample(list(JOBS), days)
    prompt = (
        f"Write a diary of {who} in {city}, who tries a new job every day from "
        f"{DAYS[first]}: {', '.join(jobs)}. Mention {hobby}."
    )
    lines = []
    for i, job in enumerate(jobs):
        morning, noon, evening = JOBS[job]
        lines.append(
            f"{DAYS[(first + i) % 7]}: Today I am {article(job)} in {city}. The {job} "
            f"{morning}, then {noon}, and at night {evening}."
        )
    lines.append(f"I liked being {article(jobs[0])} best, but I like {hobby} even more. {who}")
    return prompt, "\n".join(lines)
