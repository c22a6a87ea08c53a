"""The one exception that means: the user can fix this, and here is how."""


class UserError(Exception):
    """A mistake in a config, a command line or an input file, told in one line without a traceback.

    The message names the file, the key, the value and what to do. `train.py` prints it and ends with exit code 2.
    """
