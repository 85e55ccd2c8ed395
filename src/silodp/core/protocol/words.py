"""Spell a key's fingerprint as words that two people can read to each other over the telephone.

The words stand for the first 16 bytes of the SHA-256 of a label and the key, one of 256 words for
each byte. To find another key with the same words takes about 2^128 attempts. The list is public
and will never change.
"""

from __future__ import annotations

import hashlib

_LABEL = b"silodp identity 1"
COUNT = 16
WORDS = tuple(
    """
acid acorn actor album alley almond anchor angel ankle apple april apron arch arrow aspen atlas attic august autumn badger baker balcony
bamboo banana banner barley basket beach beaver beetle bicycle biscuit bishop blanket blossom bottle branch bread bridge broom bucket
butter button cabin cable cactus camel camera candle canoe canyon carbon carpet carrot castle cattle cedar cellar cement cherry chimney
cinema circle circus citizen clay clock clover coconut coffee comet copper coral corner cotton cousin cradle crater cricket crystal
curtain cushion daisy dancer december desert diamond dinner doctor dolphin donkey dragon drawer drummer eagle easter echo elbow elephant
emerald engine evening fabric falcon farmer feather fence fiddle finger flag flute forest fossil fountain fox friday garage garden garlic
ginger giraffe glacier glove goblet golf gorilla granite guitar hammer harbor harvest hazel helmet hermit hockey honey horizon hotel
hunter igloo insect island ivory jacket jaguar january jasmine jersey jigsaw jungle kayak kettle kidney kitchen kitten ladder lantern
lemon leopard letter lilac lizard lobster locket lotus magnet mango maple marble market meadow melon mirror monday monkey mosaic mountain
muffin museum mustard napkin needle nickel november nutmeg oasis octopus olive onion opera orange orchard otter oyster paddle palace panda
paper parrot peanut pebble pelican pencil penguin pepper piano pigeon pillow pirate planet pocket pony potato prairie pumpkin puzzle
rabbit radio raven ribbon river robin rocket saddle salmon sandal saturn scissors shadow silver spider sugar summer sunday temple thunder
tiger timber tomato trumpet tulip tunnel turtle umbrella valley velvet village violin volcano wagon walnut willow winter yellow zebra
zipper
""".split()  # noqa: E501, SIM905
)


def fingerprint(key: str) -> str:
    """Return the 16 words of an Ed25519 public key in hexadecimal digits."""
    digest = hashlib.sha256(_LABEL + bytes.fromhex(key)).digest()
    return " ".join(WORDS[byte] for byte in digest[:COUNT])
