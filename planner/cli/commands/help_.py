"""`plan help`: the full text of an option, or the help of a command."""

from typing import Annotated, Any

import typer

from planner.cli.errors import reporting
from planner.cli.helping import command_help, option_names, option_texts
from planner.cli.texts import say
from planner.errors import RequestError, unknown_name


def help_(
    invocation: typer.Context,
    word: Annotated[str | None, typer.Argument(metavar="WORD", help="An option, or a command.")] = None,
) -> None:
    """Print the full text of an option, or the help of a command.

    plan help gathers
    plan help --offload
    plan help export
    """
    with reporting():
        above: Any = invocation.parent
        group = above.command
        if word is None:
            say(above.get_help())
        elif word in group.commands:
            command = group.commands[word]
            with type(invocation)(command, info_name=word, parent=above) as inside:
                typer.echo(command_help(command, inside), nl=False)
        else:
            texts = option_texts(group, word)
            if not texts:
                known = {name.lstrip("-") for name in option_names(group)} | set(group.commands)
                raise RequestError(unknown_name("option or command", word, known))
            say("\n\n".join(texts))
