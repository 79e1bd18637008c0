"""What the tiny pair's corpus speaks of, and how it puts words together.

Invariant: an entry's place in its list is part of the corpus, since a seeded generator chooses by
place: another word in the middle gives other prompts for the same seed, and another held-out set.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

NAMES = (
    "Anna Ben Clara David Emma Felix Grace Henry Iris Jack Kate Leo Mia Noah Olivia Paul Quinn Rosa"
    " Sam Tara Uma Victor Wendy Xavier Yara Zoe Alan Bella Carlos Diana Ethan Fiona George Hannah"
    " Ivan Julia Kevin Laura Mark Nina Oscar Petra Ravi Sara Tom Vera Will Amir Lena Hugo"
).split()
ITEMS = (
    "apples pears books pencils stamps shells marbles cards cookies candles balloons stickers coins"
    " oranges lemons cups plates flowers notebooks buttons ribbons toys eggs bottles boxes plums"
    " lamps mugs scarves tickets peaches brushes kites drums hats bells"
).split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = (
    "January February March April May June July August September October November December"
).split()
CITIES = (
    "Paris Rome Madrid Berlin Oslo Vienna Lisbon Dublin Athens Prague Tokyo Cairo Lima Quito Delhi"
    " Boston Denver Toronto Sydney Nairobi"
).split()
HOBBIES = (
    "chess painting hiking cooking reading swimming dancing gardening cycling singing fishing"
    " running drawing sailing knitting skating"
).split()
COLORS = "red blue green yellow purple orange white black brown pink silver golden".split()
FRUITS = "apple banana cherry grape lemon mango orange peach pear plum kiwi fig".split()
TOOLS = "hammer ladder wrench saw drill shovel rake bucket rope nail".split()
CLOTHES = "coat scarf glove shirt sock boot jacket dress belt cap".split()
COUNTRIES: dict[str, tuple[str, str, str]] = {
    "France": ("Paris", "Europe", "French"), "Italy": ("Rome", "Europe", "Italian"),
    "Spain": ("Madrid", "Europe", "Spanish"), "Germany": ("Berlin", "Europe", "German"),
    "Norway": ("Oslo", "Europe", "Norwegian"), "Austria": ("Vienna", "Europe", "German"),
    "Portugal": ("Lisbon", "Europe", "Portuguese"), "Greece": ("Athens", "Europe", "Greek"),
    "Japan": ("Tokyo", "Asia", "Japanese"), "Egypt": ("Cairo", "Africa", "Arabic"),
    "Peru": ("Lima", "South America", "Spanish"), "Cuba": ("Havana", "North America", "Spanish"),
    "China": ("Beijing", "Asia", "Chinese"), "Thailand": ("Bangkok", "Asia", "Thai"),
    "Poland": ("Warsaw", "Europe", "Polish"), "Sweden": ("Stockholm", "Europe", "Swedish"),
    "Finland": ("Helsinki", "Europe", "Finnish"), "Denmark": ("Copenhagen", "Europe", "Danish"),
    "Hungary": ("Budapest", "Europe", "Hungarian"), "Turkey": ("Ankara", "Asia", "Turkish"),
    "Vietnam": ("Hanoi", "Asia", "Vietnamese"), "Chile": ("Santiago", "South America", "Spanish"),
    "Iceland": ("Reykjavik", "Europe", "Icelandic"), "Morocco": ("Rabat", "Africa", "Arabic"),
}  # fmt: skip
ANIMALS: dict[str, tuple[str, str, str]] = {  # home, food, what it is known for
    "fox": ("in the forest", "berries and mice", "its clever tricks and its bushy tail"),
    "owl": ("in old trees", "mice", "its silent flight and its sharp eyes"),
    "bear": ("in the mountains", "honey and fish", "its great strength and its long winter sleep"),
    "rabbit": ("in the meadow", "grass and carrots", "its long ears and its quick jumps"),
    "turtle": ("near the pond", "leaves", "its hard shell and its slow steps"),
    "cat": ("in the house", "fish", "its soft paws and its quiet steps"),
    "dog": ("on the farm", "bones", "its loyal heart and its good nose"),
    "horse": ("in the stable", "hay and oats", "its speed and its strong legs"),
    "duck": ("on the lake", "water plants", "its loud voice and its flat beak"),
    "mouse": ("under the floor", "cheese and seeds", "its small size and its sharp teeth"),
    "wolf": ("in the cold north", "meat", "its long howl and its close family"),
    "frog": ("in the swamp", "flies", "its long jumps and its green skin"),
    "bee": ("in the garden", "nectar", "its hard work and its sweet honey"),
    "lion": ("on the plains", "meat", "its loud roar and its proud mane"),
    "elephant": ("on the savanna", "leaves and fruit", "its long trunk and its good memory"),
    "penguin": ("on the ice", "fish", "its funny walk and its fast swimming"),
    "squirrel": ("in the oak tree", "nuts", "its quick climbing and its hidden stores"),
    "deer": ("in the quiet woods", "grass and bark", "its thin legs and its careful ears"),
}  # fmt: skip
PLACES: dict[str, str] = {
    "forest": "The trees were tall, and the light fell softly through the leaves.",
    "harbor": "The boats rocked on the waves, and the air smelled of salt.",
    "library": "The shelves reached up to the roof, and nobody spoke above a whisper.",
    "market": "The stalls were full of bread and fruit, and everyone was talking at once.",
    "garden": "The flowers stood in long rows, and the bees were busy all day.",
    "castle": "The walls were made of grey stone, and the towers touched the clouds.",
    "desert": "The sand stretched to the horizon, and the sun burned in the empty sky.",
    "village": "The houses were small and bright, and smoke rose from every chimney.",
    "cave": "The rocks were wet and cold, and every sound came back as an echo.",
    "island": "The beach was white, and the sea was warm and clear.",
    "valley": "The river ran between green hills, and sheep slept in the shade.",
    "station": "The trains came and went, and the big clock never stopped.",
    "museum": "The halls were quiet, and old paintings looked down from the walls.",
    "bakery": "The oven was hot before sunrise, and the street smelled of warm bread.",
    "farm": "The fields were yellow with wheat, and the rooster sang every morning.",
    "mountain": "The path was steep, and snow covered the highest rocks.",
}  # fmt: skip
TREASURES: dict[str, tuple[str, str]] = {  # how it looked, what happened
    "lamp": ("It was dusty, but it still gave a warm light.", "showed the way home in the dark"),
    "map": ("It was drawn in blue ink on thin paper.", "led to a hidden spring of fresh water"),
    "key": ("It was small and made of silver.", "opened a door that nobody had used for years"),
    "bell": ("It was heavy, and it rang like clear water.", "called all the neighbors together"),
    "coin": ("It was older than anyone could remember.", "paid for a new roof on the school"),
    "book": ("Its pages were full of songs and pictures.", "taught everyone a song about spring"),
    "seed": ("It was no bigger than a grain of rice.", "grew into a tree with golden leaves"),
    "ring": ("It had a green stone that glowed at night.", "turned out to belong to the queen"),
    "flute": ("It was carved from a single piece of wood.", "made even the tired birds dance"),
    "mirror": ("Its glass was as clear as a calm lake.", "sent the sunlight into every dark room"),
    "rope": ("It was long and very strong.", "pulled a lost boat back to the shore"),
    "letter": ("It was sealed with red wax.", "brought good news from far away"),
    "compass": ("Its needle always shook a little.", "pointed to a friend in need"),
    "blanket": ("It was soft and full of stars.", "kept three children warm in the storm"),
}  # fmt: skip
MOODS: dict[str, str] = {
    "happy": "Everyone laughed and danced until the stars came out. It was a very happy day.",
    "sad": "In the end the two friends had to say goodbye, and they cried a little. But they never"
    " forgot each other.",
    "funny": "Then the wind took the hat of the mayor and dropped it on a goat. People still laugh"
    " about it today.",
    "calm": "In the evening the wind became quiet, and the moon rose slowly. All was well.",
    "brave": "It took a lot of courage, but fear did not win that day. From then on everyone told"
    " the tale with pride.",
    "mysterious": "The next morning there was nothing left but a small blue feather. Nobody ever"
    " found out where it came from.",
}  # fmt: skip
JOBS: dict[str, tuple[str, str, str]] = {
    "baker": ("lights the oven and mixes the dough", "sells fresh bread to the neighbors",
              "cleans the tables and counts the coins"),
    "teacher": ("writes a question on the board", "helps the children with their reading",
                "marks the homework with a red pen"),
    "farmer": ("feeds the chickens and the cows", "drives the tractor over the field",
               "closes the gate and looks at the sky"),
    "doctor": ("reads the notes about the patients", "listens to hearts and looks at sore throats",
               "washes her hands and calls the hospital"),
    "pilot": ("checks the weather and the fuel", "flies over mountains and rivers",
              "lands the plane and thanks the crew"),
    "gardener": ("waters the roses and the beans", "cuts the hedge and pulls the weeds",
                 "puts the tools back into the shed"),
    "sailor": ("raises the sails and studies the map", "steers the ship through the waves",
               "ties the ropes and watches the stars"),
    "painter": ("opens the window and mixes the colors", "paints the hills in green and gold",
                "cleans the brushes in warm water"),
    "cook": ("buys fish and herbs at the market", "chops the onions and stirs the soup",
             "serves the last guests and washes the pots"),
    "builder": ("carries the bricks up the ladder", "lays the bricks in a straight line",
                "covers the wall in case of rain"),
}  # fmt: skip
DISHES: dict[str, tuple[tuple[str, int], tuple[str, int], tuple[str, ...]]] = {
    "pancakes": (("eggs", 1), ("cups of flour", 2), ("Mix the eggs and the flour with milk.",
                 "Heat some butter in a pan.", "Fry each side until it is golden.")),
    "tomato soup": (("tomatoes", 3), ("cups of water", 2), ("Cut the tomatoes into small pieces.",
                    "Boil them in the water for twenty minutes.", "Add salt and stir well.")),
    "fruit salad": (("apples", 1), ("spoons of honey", 2), ("Wash the fruit in cold water.",
                    "Cut it into small pieces.", "Mix everything with the honey.")),
    "fried rice": (("eggs", 1), ("cups of rice", 1), ("Boil the rice and let it cool.",
                   "Fry the eggs in a hot pan.", "Add the rice and stir for five minutes.")),
    "pasta": (("tomatoes", 2), ("handfuls of noodles", 2), ("Boil the noodles in salted water.",
              "Cook the tomatoes with garlic.", "Pour the sauce over the noodles.")),
    "omelette": (("eggs", 2), ("slices of cheese", 1), ("Beat the eggs with a fork.",
                 "Pour them into a warm pan.", "Add the cheese and fold it in half.")),
    "potato salad": (("potatoes", 3), ("spoons of oil", 1), ("Boil the potatoes until soft.",
                     "Peel them and cut them into slices.", "Mix them with the oil and salt.")),
}  # fmt: skip

Pair = tuple[str, str]  # a prompt and its answer
Rng = random.Random


def article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def join_words(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def in_steps(steps: list[str], result: str) -> str:
    lines = [f"Step {i}: {step}" for i, step in enumerate(steps, 1)]
    return "\n".join([*lines, f"Answer: {result}"])
