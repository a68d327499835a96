"""Shell completion: the completion functions for each shell, and the candidates they ask for."""

import argparse
from collections.abc import Mapping, Sequence

# Set by the shell functions, which pass the words up to the cursor.
ASKED_BY = "_KERAS_PARAGRAD_COMPLETE"

SCRIPTS = {
    "bash": f"""_keras_paragrad() {{
    local IFS=$'\\n'
    COMPREPLY=($({ASKED_BY}=1 "$1" "${{COMP_WORDS[@]:1:COMP_CWORD}}" 2>/dev/null))
}}
complete -o bashdefault -o default -F _keras_paragrad keras-paragrad""",
    "zsh": f"""_keras_paragrad() {{
    local -a found
    found=("${{(@f)$({ASKED_BY}=1 "${{words[1]}}" "${{(@)words[2,$CURRENT]}}" 2>/dev/null)}}")
    if [[ -n "${{found[*]}}" ]]; then compadd -a found; else _files; fi
}}
compdef _keras_paragrad keras-paragrad""",
    "fish": f"""function __keras_paragrad
    set -lx {ASKED_BY} 1
    set -l words (commandline -opc) (commandline -ct)
    $words[1] $words[2..-1] 2>/dev/null
end
complete -c keras-paragrad -a '(__keras_paragrad)'""",
}


def candidates(
    parser: argparse.ArgumentParser, commands: Mapping[str, argparse.ArgumentParser], words: Sequence[str]
) -> list[str]:
    """Completions of the last word; empty where a file name or any other word may stand.

    Args:
        parser: The top-level parser.
        commands: The parser of each command, by name.
        words: The words after the program's name, up to the cursor.
    """
    *before, last = words or [""]
    if not before:
        return _beginning(last, [*commands, *_options(parser)])
    if before[0] not in commands:
        return []
    options = _options(commands[before[0]])
    waiting: argparse.Action | None = None
    for word in before[1:]:
        if waiting is not None:
            waiting = None
        elif word not in options:
            # A script or a directory: the words after it belong to the script.
            return []
        else:
            waiting = options[word] if options[word].nargs != 0 else None
    if waiting is None:
        positional = [action for action in _actions(commands[before[0]]) if not action.option_strings]
        words_of_its_own = [str(choice) for action in positional for choice in action.choices or ()]
        return _beginning(last, [*words_of_its_own, *(options if last.startswith("-") else ())])
    return _beginning(last, [str(choice) for choice in waiting.choices or ()])


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    # argparse has no public way to list a parser's actions; completion tools read this attribute too.
    return vars(parser)["_actions"]


def _options(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    return {option: action for action in _actions(parser) for option in action.option_strings}


def _beginning(start: str, words: Sequence[str]) -> list[str]:
    return [word for word in words if word.startswith(start)]
