"""A store of blocks as somebody else writes one: it keeps all of them in a dictionary."""

from jaxpaged.contracts import BlockKey, StoredBlock


class Kept:
    """Store without a bound."""

    contract = 1

    def __init__(self) -> None:
        self.blocks: dict[BlockKey, StoredBlock] = {}

    def contains(self, key):
        return key in self.blocks

    def get(self, key):
        return self.blocks.get(key)

    def put(self, key, block):
        self.blocks[key] = block

    def clear(self, space):
        self.blocks = {key: block for key, block in self.blocks.items() if key.space != space}

    def close(self):
        self.blocks = {}
