"""Work items: what a loop has to do, read once from a file, a directory or a command.

    item ◄─ formats ◄─ load
    the value    one module for each way to write items    source → ordered items

The state of an item is the loop's own. Nothing here writes to the source, and what an agent writes into it
later changes nothing.
"""
