"""Logging: human lines on a terminal, JSON lines otherwise, and no way for a stranger to write on either.

Everything that is logged, by this program or by libraries through `logging`, passes `scrub`: a peer's text can then
neither forge a line nor send the terminal a command. Text known to come from others is cut short besides by `clean`
where it is put into a message. Modules log with `structlog.get_logger(__name__)`.
"""

import logging
import sys
from typing import Any, Literal, TextIO

import msgspec
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from sapo_node.monitor.text import clean, harmless

__all__ = ["adopt", "clean", "clean_lines", "harmless", "scrub", "setup"]

LogFormat = Literal["auto", "human", "json"]

VALUE_LIMIT = 1000  # characters of one logged value: a line stays readable and the log file's growth bounded
TRACEBACK_LIMIT = 20_000  # characters; deep enough for any real one
ITEMS_LIMIT = 50  # entries of a logged list or dictionary
DEPTH_LIMIT = 4


def clean_lines(text: str, limit: int = TRACEBACK_LIMIT) -> str:
    """`clean` for text of several lines, such as a traceback: the line ends stay, the END is kept."""
    return "\n".join(_indent(line) + clean(line, VALUE_LIMIT) for line in text[-limit:].splitlines())


def _indent(line: str) -> str:
    return " " * min(40, len(line) - len(line.lstrip(" ")))


def scrub(logger: WrappedLogger, name: str, event: EventDict) -> EventDict:
    """structlog processor: every value harmless, bounded and encodable."""
    return {
        clean(key): clean_lines(str(value)) if key in ("exception", "stack") else _scrubbed(value)
        for key, value in event.items()
    }


def _scrubbed(value: Any, depth: int = 0) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, dict) and depth < DEPTH_LIMIT:
        items = list(value.items())[:ITEMS_LIMIT]
        return {clean(str(key)): _scrubbed(item, depth + 1) for key, item in items}
    if isinstance(value, list | tuple | set | frozenset) and depth < DEPTH_LIMIT:
        return [_scrubbed(item, depth + 1) for item in list(value)[:ITEMS_LIMIT]]
    return clean(str(value), VALUE_LIMIT)


def setup(level: str = "info", log_format: LogFormat = "auto", stream: TextIO | None = None) -> None:
    """Send structlog and `logging` to `stream` (stderr where None); safe to call again.

    Libraries speak at warning level and above; `level` is that of this program's own lines.
    """
    stream = sys.stderr if stream is None else stream
    human = log_format == "human" or (log_format == "auto" and stream.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.TimeStamper(fmt="%H:%M:%S" if human else "iso", utc=not human, key="time"),
        structlog.processors.StackInfoRenderer(),
    ]
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,  # loggers made before `setup` was called must follow it too
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                scrub,
                *(_human(stream.isatty()) if human else [structlog.processors.JSONRenderer(_json)]),
            ],
            foreign_pre_chain=[*shared, _name_library],
        )
    )
    root = logging.getLogger()
    for old in [found for found in root.handlers if isinstance(found.formatter, structlog.stdlib.ProcessorFormatter)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    for own in ("sapo_node", "__main__"):
        logging.getLogger(own).setLevel(level.upper())
    logging.captureWarnings(True)
    adopt("hivemind")


def adopt(library: str) -> None:
    """Take over a library's logger that brought its own handler; call it again after importing such a library.

    hivemind installs a handler of its own, with colours, as soon as its first module is imported.
    """
    logger = logging.getLogger(library)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    logger.propagate = True
    logger.setLevel(logging.WARNING)


def _name_library(logger: WrappedLogger, name: str, event: EventDict) -> EventDict:
    """A line that is not ours says whose it is."""
    record = event.get("_record")
    if isinstance(record, logging.LogRecord):
        event["library"] = record.name
    return event


def _json(event: EventDict, **_: Any) -> str:
    return msgspec.json.encode(event).decode()  # NaN becomes null; json.dumps would write what no JSON reader takes


def _human(colors: bool) -> list[Processor]:
    return [
        _short_floats,
        structlog.dev.ConsoleRenderer(
            colors=colors,
            pad_event_to=0,
            sort_keys=False,
            timestamp_key="time",
            exception_formatter=structlog.dev.plain_traceback,
        ),
    ]


def _short_floats(logger: WrappedLogger, name: str, event: EventDict) -> EventDict:
    return {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in event.items()}
