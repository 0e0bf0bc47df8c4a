#!/usr/bin/env python3
# /// script
# requires-python = ">=3.9"
# dependencies = ["requests>=2.25"]
# ///
"""mm asks a language model a question and shows it think, live, before it answers.

    mm "why is the sky blue?"          one question; in a pipe, stdout is the answer alone
    git diff | mm "review this"        piped text is added after the question
    mm                                 a conversation (/help lists its commands)
    mm -p ollama -m qwen3:8b "hello"   a named server and model; else mm looks for a local server
    mm --check                         what would be used, and whether it answers

It speaks to any OpenAI-compatible server: Docker Model Runner, llama.cpp's llama-server, Ollama,
vLLM, LM Studio, or a hosted one. It needs Python 3.9 and `requests`, and no configuration.

The path of a token, from the socket to the screen, is one line downwards; each step is a function
or class of that name:

    in a thread of its own, the reader:
        Connection         holds the socket, so that any thread can end the exchange
        body_pieces        the body's bytes as they arrive
        Tap                --tap's copy of them; what requests' iter_lines reads from
        events             server-sent events, from the lines
        deltas             (kind, value): a piece of thinking, of the answer, of a tool call, ...
        ModelCall.read     puts them into a queue
    in the main thread:
        ModelCall          takes them out, with a clock: the watchdog
        split_thinking     parts thinking in <think> tags, where a server leaves it in the answer
        read_reply         notes them in a Reply, and makes events of them
        Conversation.ask   the events of a turn: calls, tools, what is asked again
        run_turn           hands each to a view, and hears Ctrl-C
        Person.show        the view of a person (Ndjson.show: of a program)
        Pen.write          text that a terminal may see
        Pen.flush          to the screen, as soon as nothing more is waiting

Sections, each using only functions and classes that stand above it (a Backend, section 3, is handed
to section 2 as it is):

     0 text and JSON  what every section uses; MMError
     1 settings       what can be set, where it is read from, one line per fault
     2 errors         from whatever went wrong to one line a person can act on
     3 providers      the servers mm knows, as data; which one is used; what it says of itself
     4 the wire       bytes to lines to events to deltas, tolerant of everything servers really send
     5 the watchdog   one reader thread per call; what counts as a sign of life; how a call is ended
     6 requests       where a conversation becomes a request body; which thinking goes back
     7 protocols      chat messages or a raw prompt, thinking in tags: what is posted, how it is read
     8 tools          what a model may call
     9 conversation   a turn, and what is left of it when it breaks; the context window
    10 sessions       a conversation on disk
    11 display        a person's view and NDJSON, of the same events; a turn shown, and Ctrl-C in it
    12 the REPL       prompt, commands, Ctrl-C at the prompt
    13 demo, replay   a scripted server; a recorded stream
    14 command line   options and exit codes
"""
import os
import sys

__version__ = "0.1.0"
# the other imports double the time this takes
if __name__ == "__main__" and sys.argv[1:] == ["--version"]:
    try:
        os.write(1, f"mm {__version__}\n".encode())
    except OSError:
        os._exit(1)
    os._exit(0)

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
    # while mm is loading, Ctrl-C ends it without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import errno
import io
import json
import math
import queue
import re
import threading
import time
from urllib.parse import urlsplit, urlunsplit


# ==================================================================================================
# 0. Text and JSON
#
# What every section uses. Text that comes from elsewhere can hold what no encoder takes (half of a
# surrogate pair) and JSON can hold what no program wants (NaN, a million brackets); both are put
# right where they enter or leave. So are signals.
# ==================================================================================================

class MMError(Exception):
    """What ends a call, a turn or a run: `kind` is one of the error kinds of --json, `message` one
    line for a person.

    again: what may be tried, for the conversation to decide: "" nothing, "stream" the same call
    once more, "loading" and "busy" the same call after `wait` seconds, until the model is loaded or
    once, "field" the call without the optional `field`, "tools" without tools. window: the context
    in tokens, where an overflow names it.
    """

    def __init__(self, kind, message, again="", wait=1.0, field="", window=0):
        super().__init__(message)
        self.kind, self.message = kind, message
        self.again, self.wait, self.field, self.window = again, wait, field, window


def one_line(text, limit=500):
    """`text` on one line of at most `limit` characters, with runs of white space folded."""
    text = " ".join(str(text).split())
    return text if len(text) <= limit else text[:limit - 1] + "…"


def did_you_mean(word, words):
    import difflib  # only when something is misspelt
    close = [other for other in words if other.lower().startswith(word.lower())]
    close = close or difflib.get_close_matches(word, words, 1)
    return f" (did you mean {close[0]}?)" if close else ""


def clean(text):
    """`text` with surrogate pairs joined and lone surrogates replaced, so that it can be encoded.
    """
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def cleaned(value):
    """JSON data without lone surrogates."""
    return json.loads(clean(json.dumps(value, ensure_ascii=False)))


def readable(text):
    """Text from the command line or a terminal, with what is no text replaced.

    Its bytes are UTF-8 more often than the locale says.
    """
    try:
        return os.fsencode(text).decode()
    except UnicodeError:
        return clean(text)


def decoded(raw):
    """A body's bytes as text: UTF-8, else Latin-1 (some proxies write their errors so)."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        return raw.decode("latin-1")


# NaN and Infinity become null; a line break in a string is taken, as models write them so
JSON = json.JSONDecoder(parse_constant=lambda word: None, strict=False)


def read_json(text):
    """The JSON value that `text` is. Raises ValueError."""
    try:
        return JSON.decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def json_or_text(text):
    try:
        return read_json(text)
    except ValueError:
        return str(text)


def as_int(value):
    """A number that a server tells, as a whole one; 0 for anything else."""
    is_number = type(value) in (int, float)  # a bool is none
    return int(value) if is_number and 0 < value < 1 << 53 else 0


def on_signal(number, handler):
    """signal.signal(), but what a parent has ignored stays so (nohup, a shell's job in the
    background). Gives the handler before.
    """
    before = signal.getsignal(number)
    if before != signal.SIG_IGN:
        signal.signal(number, handler)
    return before


# bytes of a file or of piped text; beyond that it is a mistake (/dev/zero), not a question
MOST_TEXT = 32 << 20


def read_bytes(path, option):
    """A file's bytes. Raises MMError("config"), which names the option that named the file."""
    try:
        with open(path, "rb") as file:
            raw = file.read(MOST_TEXT + 1)
    except OSError as error:
        raise MMError("config", f"{option} {path}: {error.strerror}") from None
    if len(raw) > MOST_TEXT:
        raise MMError("config", f"{option} {path}: larger than {MOST_TEXT >> 20} MiB")
    return raw


# ==================================================================================================
# 1. Settings
#
# Every setting is a row of a table. Its value comes from an option, else (with -c and -r) the
# session, else the environment, else the config file, else the default, and remembers which, so
# that a fault can name it. YAML turns `no` into false, 4.0 into a number and 22:22 into 1342, so mm
# reads each of its scalars as text (BaseLoader) and lets the row's kind decide. A config file is
# never taken from the current directory: a cloned repository must not choose where prompts go.
# ==================================================================================================

# key: (kind, default, variable of the environment, option, its help); url and think are no keys of
# the config file
SETTINGS = {
    "provider": ("text", "", "MM_PROVIDER", "-p, --provider NAME", "which server (see below)"),
    "model": ("text", "", "MM_MODEL", "-m, --model NAME", "which model"),
    "url": ("text", "", "MM_BASE_URL", "--url URL", "base URL of the server"),
    "system": ("text", "", "", "-s, --system TEXT", "system prompt"),
    "think": ("flag", None, "", "--think", "ask the server to think, or not to"),
    "showThinking": ("flag", True, "", "-R, --hide-thinking",
                     "do not show the thinking (it is read all the same)"),
    "watchdogTimeout": ("seconds", 20.0, "", "--watchdog S",
                        "longest silence between two tokens in seconds, 0: no limit"),
    "firstTokenTimeout": ("seconds", 120.0, "", "--first-token S",
                          "longest wait for the first one in seconds, 0: no limit"),
    "retries": ("count", 1, "", "--retries N", "how often a broken stream is asked for again"),
    "maxSteps": ("count", 25, "", "--max-steps N", "model calls in one turn, 0: no limit"),
    "tools": ("names", [], "", "-t, --tools NAMES",
              "offer tools to the model: a comma list, or all (list_files, read_file, ...)"),
    "commands": ("as it is", {}, "", "", ""),
    "commandTimeout": ("seconds", 120.0, "", "", ""),
    "compactAt": ("fraction", 0.8, "", "", ""),
    "contextWindow": ("count", 0, "", "", ""),
    "reasoningEcho": ("flag", False, "", "", ""),
    "save": ("flag", True, "", "--no-save", "do not save this conversation"),
    "sampling": ("map", {}, "", "", ""),
    "providers": ("as it is", {}, "", "", ""),
}
FILE_KEYS = {key: row[0] for key, row in SETTINGS.items() if key not in ("url", "think")}
PROVIDER_KEYS = {  # the keys of an entry below `providers:`, and their kinds
    "like": "text", "url": "text", "fallback": "names", "apiKeyEnv": "variable", "model": "text",
    "local": "flag", "sampling": "map", "thinkTags": "tags", "protocol": "protocol",
    "template": "template",
}
LOOKS_LIKE_A_SECRET = re.compile(r"(?i)^(api[-_]?key|key|token|secret|password|bearer)$")
OF_A_PROVIDER = " (it belongs below `providers: NAME:`)"
KEY_IN_FILE = ("a key does not belong in this file: put it into an environment variable, "
               "and the variable's name here as apiKeyEnv")


def typed(value):
    """A value that goes out as it is (sampling, JSON schemas): text is JSON where it parses.

    YAML's scalars are read as text, so that `5e-4` is the number and `off` the word that they look
    like.
    """
    if isinstance(value, dict):
        return {key: typed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [typed(item) for item in value]
    return json_or_text(value) if isinstance(value, str) else value


def as_number(value, most=1e9):
    """The number in a text such as 5e-4, as YAML gives it; not negative, not nan."""
    number = float(str(value))  # str: JSON's true is no number
    if not 0 <= number <= most:
        raise ValueError
    return number


def as_count(value):
    number = as_number(value)
    if number % 1:
        raise ValueError
    return int(number)


def as_names(value):
    items = value.split(",") if isinstance(value, str) else value
    return [item.strip() for item in items if item.strip()]


FLAGS = {"true": True, "yes": True, "on": True, "1": True,
         "false": False, "no": False, "off": False, "0": False}
FORMATS = {name: name for name in ("chatml", "llama3", "gemma", "mistral")}
# kind: (a function that gives the value, or raises where it is none, or a table of words and their
# values; what a person is told that it wants)
KINDS = {
    "text": (clean, "text (put it in quotes)"),
    "flag": (FLAGS, "true or false"),
    "tags": ({**FLAGS, "open": "open"}, "true, false or open"),
    "seconds": (as_number, "a number of seconds, such as 20"),
    "count": (as_count, "a whole number, 0 or more"),
    "fraction": (lambda value: as_number(value, 1), "a number from 0 to 1"),
    "names": (as_names, "a list of names"),
    "variable": (lambda value: re.fullmatch(r"[A-Z_][A-Z0-9_]{0,63}", value).group(),
                 "the name of an environment variable, in capitals"),
    "map": (lambda value: typed(dict.copy(value)), "a map of keys and values"),
    "as it is": (dict.copy, "a map of keys and values"),  # each entry is read by itself
    "protocol": ({"chat": "chat", "completions": "completions"}, "chat or completions"),
    "template": (FORMATS, ", ".join(FORMATS)),
}


class Settings:
    """Every setting's value, and for each that is no default, where it came from.

    settings["retries"] is the value; settings.source("retries") is "--retries", "config.yaml:
    retries" or "" (the default); a model's can also be "$MM_MODEL", or "session ID".
    settings.notices holds what a person should hear, such as unknown keys; settings.faults a line
    for each value that cannot be used; settings.file is the config file, or "".
    """

    def __init__(self):
        self.values = {key: row[1] for key, row in SETTINGS.items()}
        self.sources, self.notices, self.faults, self.file = {}, [], [], ""

    def __getitem__(self, key):
        return self.values[key]

    def source(self, key):
        return self.sources.get(key, "")

    def is_option(self, key):
        return self.source(key).startswith("--")

    def put(self, key, value, source):
        self.values[key] = self.convert(value, SETTINGS[key][0], source)
        self.sources[key] = source

    def convert(self, value, kind, source):
        """`value` as its kind wants it; else None, and a fault that begins with the source."""
        read, wanted = KINDS[kind]
        try:
            return read[str(value).lower()] if isinstance(read, dict) else read(value)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            # a map could hold a key, and a variable's name could be one
            is_hidden = isinstance(value, (dict, list)) or kind == "variable"
            shown = "what stands there" if is_hidden else f"'{one_line(value, 60)}'"
            self.faults.append(f"{source}: wants {wanted}, not {shown}")

    def read_map(self, data, kinds, prefix):
        """{key: value} of a map in the config file, each value as its kind in `kinds` wants it.

        prefix: what stands before the key where a line names it.
        """
        if not isinstance(data, dict):
            where = prefix.rstrip(".: ")
            self.faults.append(f"{where}: wants keys and values, such as `model: qwen3`")
            return {}
        values = {}
        for key, value in data.items():
            source = prefix + key
            if LOOKS_LIKE_A_SECRET.match(key):
                self.faults.append(f"{source}: {KEY_IN_FILE}")
            elif key not in kinds:
                hint = OF_A_PROVIDER if key in PROVIDER_KEYS else did_you_mean(key, kinds)
                self.notices.append(f"{source}: unknown key{hint}")
            # an empty text is no value, but an empty list of names
            elif value not in (None, "~", "null") and (value != "" or kinds[key] == "names"):
                values[key] = self.convert(value, kinds[key], source)
        return values

    def take_file(self, named_by):
        """Takes the config file's values. Raises MMError("config") where it cannot be read."""
        data = blaming(self.file, parse_config, read_bytes(self.file, named_by))
        values = self.read_map(data, FILE_KEYS, f"{self.file}: ")
        self.values.update(values)
        self.sources.update({key: f"{self.file}: {key}" for key in values})
        for name, entry in (values.get("providers") or {}).items():
            prefix = f"{self.source('providers')}.{name}."
            self["providers"][name] = self.read_map(entry, PROVIDER_KEYS, prefix)


def load_settings(options, config="", environ=os.environ):
    """The settings of a run. options: {key: value} from the command line; config: --config's value.

    Raises MMError("config") with one line per fault. (A session that is resumed comes later, in
    section 14.)
    """
    settings = Settings()
    settings.file, named_by = config_path(config, environ)
    if settings.file:
        settings.take_file(named_by)
    for key, (_, _, variable, option, _) in SETTINGS.items():
        from_environment = environ.get(variable, "").strip()
        if from_environment:
            settings.put(key, from_environment, f"${variable}")
        if options.get(key) is not None:
            settings.put(key, options[key], "".join(re.findall("--[a-z-]+", option)))
    if settings.faults:
        raise MMError("config", "\n".join(settings.faults))
    return settings


def config_path(option, environ):
    """-> (path, what named it); the path is "" where there is no config file, and one that was
    named must be there.
    """
    variable = environ.get("MM_CONFIG", "").strip()
    if option.strip():
        return option, "--config"
    if variable:
        return os.path.expanduser(variable), "$MM_CONFIG"
    beside = os.path.dirname(os.path.realpath(__file__))
    if os.path.isfile(beside):  # mm.pyz: beside it, not in it
        beside = os.path.dirname(beside)
    for folder in (beside, xdg_home("XDG_CONFIG_HOME", ".config", environ)):
        path = os.path.join(folder, "config.yaml")
        if os.path.isfile(path):
            return path, "the config file"
    return "", ""


def xdg_home(variable, default, environ=os.environ):
    """mm's folder below an XDG base directory; a relative or blank value counts as not set (XDG
    base directory spec).
    """
    base = environ.get(variable, "").strip()
    if not os.path.isabs(base):
        base = os.path.join(home(), default)
    return os.path.join(base, "mm")


def home():
    """The user's folder; for a container's user without one, a path below which nothing can be."""
    path = os.environ.get("HOME", "").strip()
    try:
        import pwd
        return path or pwd.getpwuid(os.getuid()).pw_dir
    except (ImportError, KeyError):
        return path or os.devnull


def blaming(where, function, *arguments):
    """function(*arguments), its MMError beginning with where the fault stands."""
    try:
        return function(*arguments)
    except MMError as error:
        raise MMError(error.kind, f"{where}: {error.message}") from None


def parse_config(raw):
    """The data in a config file's bytes, JSON or YAML; YAML's scalars stay text. Raises MMError."""
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise MMError("config", f"line {line}: not UTF-8 text") from None
    try:
        return read_json(text.strip() or "{}")  # first, as YAML forbids the tabs that JSON allows
    except ValueError as error:
        return parse_yaml(text, error)


def parse_yaml(text, json_error):
    try:
        import yaml
        return yaml.load(text, Loader=yaml.BaseLoader) or {}
    except ImportError:
        raise MMError("config", f"this is no JSON ({json_error}), and YAML needs PyYAML: "
                                f"{sys.executable} -m pip install pyyaml") from None
    except yaml.MarkedYAMLError as error:  # its own text quotes the line, which may hold a key
        line = error.problem_mark.line + 1
        problem = error.problem.replace("character '\\t'", "a tab")
        raise MMError("config", f"line {line}: {problem}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise MMError("config", one_line(error)) from None


# ==================================================================================================
# 2. Errors
#
# Servers say what is wrong in a dozen shapes (SENTENCE_KEYS), as a web page, as a stack trace of
# their template engine, or not at all. This section finds the sentence, and the HINTS table adds
# what to do about it; the EXCEPTIONS table does so where no server answered. A 500 from llama.cpp
# mostly means 'your request', so a status alone says little. Unknown errors come through in the
# server's own words.
# ==================================================================================================

MAX_WORDS = 1 << 16  # bytes of an error that are read, characters that are looked at
LONGEST_WAIT = 60.0  # seconds a Retry-After may ask for
SENTENCE_KEYS = ("error", "message", "detail", "details", "errors", "msg", "text", "reason",
                 "error_description", "title", "base_resp", "status_msg", "raw")
# (HTTP statuses, or none for any; what the words look like; kind; what to do; what may be tried)
HINTS = (
    ((0, 400, 413, 422, 500),
     r"(?i)exceed_context_size|context[ _](size|length|window)|maximum model length"
     r"|prompt (is )?too long|tokens to keep|longer than the context"
     r"|max_tokens must be at least 1, got -",
     "overflow", "ask for less, or start the server with a larger context", ""),
    ((), r"--jinja|Unsupported param: tools|Cannot use tools with stream",
     "server", "start llama-server with --jinja", "tools"),
    ((), r"enable-auto-tool-choice",
     "server", "start vLLM with the options that it names", "tools"),
    ((), r"does not support tools", "server", "", "tools"),
    ((), r"(?i)loading model|model is loading", "server", "", "loading"),
    ((401, 403), r"", "auth", "{key}", ""),
    ((), r"(?i)(model|backend)\b.{0,200}(not found|not exist|not a valid|unknown|not loaded)"
         r"|(no such|unknown|invalid|not a valid) model|no models? loaded",
     "not_found", "{get}", ""),
    ((404, 405), r"", "not_found", "mm asked {url}: is that the server's API?", ""),
    ((402,), r"", "server", "the account has no credit left", ""),
    ((413,), r"",
     "server", "the request is too large for the server, or for a proxy before it", ""),
    ((429,), r"insufficient_quota|insufficient_balance",
     "rate_limited", "the account has no credit left: see its billing", ""),
    ((429,), r"", "rate_limited", "wait a little, or choose another model", "busy"),
    ((502, 504, *range(520, 525)), r"",
     "server", "the server behind {host} did not answer: is it running?", "busy"),
    ((503,), r"", "server", "the server is busy or not ready", "busy"),
    ((0,), r"", "server", "", "stream"),
    ((), r"", "server", "", ""),
)


def sentence(value):
    """The sentence in a server's error, wherever it stands: JSON of any nesting, JSON inside a
    string, text.
    """
    if isinstance(value, str):
        try:
            return sentence(read_json(value)) or value
        except ValueError:
            return template_sentence(value.strip())
    if isinstance(value, list):
        return "; ".join(filter(None, map(sentence, value[:8])))
    if not isinstance(value, dict):
        return ""
    found = next(filter(None, (sentence(value.get(key)) for key in SENTENCE_KEYS)), "")
    if isinstance(value.get("loc"), list):  # FastAPI names the field it refused
        found = f"{'.'.join(map(str, value['loc']))}: {found}"
    behind = sentence(value.get("metadata"))  # OpenRouter: what the server behind it said
    return f"{found}: {behind}" if behind else found


def template_sentence(text):
    """The sentence of llama.cpp's template errors, which quote the template's source around it; any
    other text as it is.
    """
    newer = re.search(r"(?s)While executing.*Error: (?:Jinja Exception: )?(.+)", text)
    found = newer or re.match(r"(.+?) at row \d+, column \d+:\s*\n", text)
    return f"the chat template refuses this: {found.group(1)}" if found else text


def page_title(text):
    """The title of a web page ("" if it has none), or None when `text` is no web page."""
    text = text[:4000]
    if not re.match(r"(?is)\s*<(.{0,1000}<)?(!doctype html|html|head|body)\b", text):
        return None
    title = re.search(r"(?is)<title[^>]{0,100}>(.{0,300}?)</title", text)
    return one_line(re.sub(r"<[^>]*>?|>", "", title.group(1)), 80) if title else ""


def web_page_error(title, url):
    named = f' ("{title}")' if title else ""
    return MMError("not_found", f"{url} answered with a web page{named}, not with an API: "
                                "check the URL (most end in /v1)")


def explain(status, body, backend, url, wait=None):
    """MMError for a server's refusal: its sentence, what kind it is of, what to do about it.

    status: the HTTP status, or 0 for an error inside a stream that began with 200; body: bytes, or
    parsed JSON; url: what was asked, for the line; wait: seconds, if the server's headers name
    them.
    """
    text = decoded(body) if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False)
    title = page_title(text)
    if title is not None and (status < 400 or status == 404):
        return web_page_error(backend.redact(title), url)
    message = sentence(text) if title is None else title
    prompt, window = number_in(text, "n_prompt_tokens"), number_in(text, "n_ctx")
    if prompt and window:  # llama.cpp names them beside the sentence, which may have none
        message = f"the prompt has {prompt:,.0f} tokens and the context size is {window:,.0f}"
    message = backend.redact(message)[:MAX_WORDS] or "the server gave no reason"

    kind, advice, again = find_hint(status, message, text)
    if wait is None:
        wait = number_in(text, "retryDelay") or 1.0  # Gemini's
    if again == "busy" and wait > LONGEST_WAIT:
        advice, again = f"it asks to be left alone for {round(wait / 60):,} minutes", ""
    field = refused_field(backend, message) if status in (400, 422) and not again else ""
    if field:
        again = "field"

    advice = advice.format(key=backend.key_advice(), get=backend.get_advice(), url=url,
                           host=urlsplit(url).netloc)
    message = compose(message, f"HTTP {status}" if status else "", advice)
    return MMError(kind, message, again, wait, field, int(window))


def number_in(text, key):
    """The number at a key, wherever it stands in the text of some JSON, or 0."""
    found = re.search(rf'"{key}"[\s:"]+(\d{{1,12}}(\.\d{{1,6}})?)', text)
    return float(found.group(1)) if found else 0


def find_hint(status, message, text):
    """(kind, what to do, what may be tried) of the first row of HINTS that fits an error."""
    code = re.search(r'"code"\s*:\s*"(\w{1,60})"', text)  # OpenAI's says more than its sentence
    words = f"{message} {code.group(1)}" if code else message
    for statuses, pattern, *hint in HINTS:
        if (status in statuses or not statuses) and re.search(pattern, words):
            return hint


def refused_field(backend, message):
    """The optional field of a request that a server's message refuses, or ""."""
    for name, pattern in backend.refusal_looks():
        if re.search(pattern, message):
            return name
    return ""


def compose(message, code, advice):
    """'the message (HTTP 404): what to do', cut in the message, so that the advice survives."""
    tail = f" ({code})" if code else ""
    if advice:
        tail += f": {advice}"
    return one_line(message, 500 - len(tail)).rstrip(".: ") + tail


def show_url(url):
    """A URL as it may be shown: without a user, password or query, which can hold keys."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


UNDIALLED = "NewConnectionError|ConnectTimeoutError|NameResolutionError"  # of urllib3
# (names of exceptions; kind; the message; what may be tried). Names, as the classes stand in other
# modules in urllib3 1.26 and 2, and importing them takes time.
EXCEPTIONS = (
    ("ProxyError|InvalidProxyURL|InvalidSchema", "unreachable",
     "the proxy {proxy} (from the environment) did not connect: {reason}; "
     "set NO_PROXY={host} to go round it", ""),
    ("SSLError.*(WRONG_VERSION|RECORD_LAYER|timed out)", "unreachable",
     "no TLS connection to {host}: {reason}: is it plain http? Then the URL begins with http://",
     ""),
    ("SSLError", "unreachable",
     "no TLS connection to {host}: {reason}: "
     "check its certificate (SSL_CERT_FILE names a CA of your own)", ""),
    ("gaierror", "unreachable", "no host named {host} is known: check the URL{container}", ""),
    (UNDIALLED, "unreachable", "nothing answers at {url} ({reason}): {start}", ""),
    ("InvalidURL|MissingSchema|LocationParseError|UnicodeError", "config",
     "{url} is not a URL that can be asked: {reason}", ""),
    ("BadStatusLine|LineTooLong|UnknownProtocol", "protocol",
     "what answers at {url} does not speak HTTP: check the URL's port", "stream"),
    ("", "interrupted", "the connection was cut before the server answered ({reason})", "stream"),
)


def explain_exception(error, backend, proxy, answered):
    """MMError for an exception of requests, urllib3, http.client or a socket.

    proxy: the proxy's URL if one was used; answered: whether the response had begun.
    """
    if answered:
        return MMError("interrupted", "the connection was cut", "stream")
    chain = []  # requests wraps urllib3, which wraps http.client, which wraps OSError
    while error and not isinstance(error, TypeError):  # which urllib3 1.26 provokes, and catches
        chain.append(error)
        error = error.__context__
    names = repr(chain)
    if proxy and re.search(UNDIALLED, names):
        names = "ProxyError"
    reason = getattr(chain[-1], "strerror", None) or chain[-1]
    words = {"url": show_url(backend.url), "host": urlsplit(backend.url).hostname,
             "proxy": show_url(proxy), "reason": one_line(reason, 200),
             "start": backend.start_advice(), "container": backend.container_advice()}
    for pattern, kind, message, again in EXCEPTIONS:
        if re.search(pattern, names):
            return MMError(kind, message.format(**words), again)


# ==================================================================================================
# 3. Providers
#
# A server is an entry of PROVIDERS: data, no code. It is resolved once into a Backend (URL after
# overrides, key, model). The probe only ever advises: a server may be started after mm. A server is
# reached by a Connection of mm's own, one per call, which any thread can cut. requests offers no
# such thing (closing a response blocks until its next byte, closing a session before the headers
# does nothing), so Connection keeps a second handle on the socket and shuts that.
# ==================================================================================================

USAGE = {"stream_options": {"include_usage": True}}
# the latter is for Protocol.end_thinking()
LLAMA_FIELDS = {**USAGE, "return_progress": True, "reasoning_control": True}
EFFORT = {"on": {"reasoning_effort": "medium"}, "off": {"reasoning_effort": "none"}}
TEMPLATE_SWITCH = {"on": {"chat_template_kwargs": {"enable_thinking": True}},
                   "off": {"chat_template_kwargs": {"enable_thinking": False}}}
BOTH_SWITCHES = {  # Qwen's templates read enable_thinking, DeepSeek's and Granite's read thinking
    "on": {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}},
    "off": {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}}}

LLAMA_PROPS = "/props?model={model}&autoload=false"

PROVIDERS = {
    # url, fallback     base URLs; the others are asked when the first does not answer
    # local             it runs on the user's own machines: found by itself, its first model is used, thinking may go back to it
    # apiKeyEnv         the variable that holds its key
    # fields            optional fields that its requests take; one that is refused is left out from then on
    # thinking          how it is told to think or not
    # start, get        how it is started, how a model is got
    # A page of the server is a path below the base URL, or below the server's root if it begins with "/"; keys lead to a value in
    # it, dots between them, [] for the list's entry of the model in use ("data.[].meta.n_ctx"):
    # window            pages that tell the context it serves, which can be less than the model was trained for
    # tools             page that tells whether the model's template takes tools; where not, they are ignored without an error
    # streamsCalls      it sends a call's arguments as they are written, not in one piece after a long silence
    # For thinking that is sent back (section 6):
    # echo              the field of a message that it is read from
    # insists           the field without which it takes no calls of its own back, asked for or not
    # render            page that shows the prompt that messages become
    # keeps             page that tells whether the template keeps all thinking of a history
    # For raw prompts (section 7):
    # limit             how more is asked for than the 16 tokens at which OpenAI's protocol cuts an answer; {}: it cuts none
    "dmr": {
        "url": "http://localhost:12434/engines/v1",
        "fallback": ["http://host.docker.internal:12434/engines/v1", "http://model-runner.docker.internal/engines/v1"],
        "local": True, "apiKeyEnv": "MM_API_KEY", "fields": LLAMA_FIELDS, "thinking": TEMPLATE_SWITCH,
        "streamsCalls": True,
        "echo": "reasoning_content", "limit": {},
        "start": "docker desktop enable model-runner --tcp {port}", "get": "docker model pull {model}",
        "window": [("/engines/_configure?model={model}", "[].Config.context-size"), ("models", "data.[].dmr.context_window")],
    },
    "llamacpp": {
        "url": "http://localhost:8080/v1",
        "fallback": ["http://localhost:9931/v1",  # where newer builds listen
                     "http://host.docker.internal:8080/v1", "http://host.docker.internal:9931/v1"],
        "local": True, "apiKeyEnv": "MM_API_KEY", "fields": LLAMA_FIELDS, "thinking": TEMPLATE_SWITCH,
        "streamsCalls": True,
        "echo": "reasoning_content", "render": "/apply-template", "limit": {},
        "start": "llama-server -m MODEL.gguf --port {port}", "get": "it has the models that --models lists",
        "window": [("models", "data.[].meta.n_ctx"), (LLAMA_PROPS, "default_generation_settings.n_ctx")],
        "tools": (LLAMA_PROPS, "chat_template_caps.supports_tools"),
        "keeps": (LLAMA_PROPS, "chat_template_caps.supports_preserve_reasoning"),
    },
    "ollama": {
        "url": "http://localhost:11434/v1", "fallback": ["http://host.docker.internal:11434/v1"],
        "local": True, "apiKeyEnv": "MM_API_KEY", "fields": USAGE, "thinking": EFFORT, "echo": "reasoning",
        "start": "OLLAMA_HOST=localhost:{port} ollama serve", "get": "ollama pull {model}",
        "window": [("/api/ps", "models.[].context_length")],
    },
    "vllm": {
        "url": "http://localhost:8000/v1", "fallback": ["http://host.docker.internal:8000/v1"],
        "local": True, "apiKeyEnv": "MM_API_KEY", "fields": USAGE, "thinking": BOTH_SWITCHES, "echo": "reasoning",
        "start": "vllm serve MODEL --port {port}", "get": "it has the model it was started with (--models)",
        "window": [("models", "data.[].max_model_len")],
    },
    "lmstudio": {
        "url": "http://localhost:1234/v1", "fallback": ["http://host.docker.internal:1234/v1"],
        "local": True, "apiKeyEnv": "MM_API_KEY", "fields": USAGE, "thinking": EFFORT, "echo": "reasoning_content",
        "start": "lms server start --port {port}", "get": "lms get {model}",
        "window": [("/api/v1/models", "models.[].loaded_instances.0.config.context_length"),
                   ("/api/v0/models", "data.[].loaded_context_length")],
    },
    "openai": {
        "url": "https://api.openai.com/v1", "apiKeyEnv": "OPENAI_API_KEY", "fields": USAGE, "thinking": EFFORT,
        "streamsCalls": True,
    },
    "deepseek": {
        "url": "https://api.deepseek.com/v1", "apiKeyEnv": "DEEPSEEK_API_KEY", "fields": USAGE,
        "insists": "reasoning_content", "streamsCalls": True,
        "thinking": {"on": {"thinking": {"type": "enabled"}}, "off": {"thinking": {"type": "disabled"}}},
    },
    "openrouter": {
        "url": "https://openrouter.ai/api/v1", "apiKeyEnv": "OPENROUTER_API_KEY", "fields": USAGE,
        "thinking": {"on": {"reasoning": {"enabled": True}}, "off": {"reasoning": {"enabled": False}}},
        "window": [("models", "data.[].context_length")],
    },
}
# A server of which only a URL is known: nothing optional is sent, so that the strictest one takes
# the request.
PLAIN = {"url": "", "apiKeyEnv": "MM_API_KEY",
         "window": [("models", "data.[].meta.n_ctx"), ("models", "data.[].max_model_len"), ("models", "data.[].context_length")]}
ENTRY_DEFAULTS = {
    "fallback": [], "local": False, "fields": {}, "thinking": {}, "start": "", "get": "", "window": [], "tools": (),
    "echo": "reasoning_content", "insists": "", "streamsCalls": False, "render": "", "keeps": (), "limit": {"max_tokens": 2048},
    "model": "", "sampling": {}, "thinkTags": False, "protocol": "chat", "template": ""}

CONNECT_SECONDS = 10.0
PROBE_SECONDS = 2.0
MAX_LIST = 4 << 20  # bytes of a model list


# -- reaching a server

class Connection:
    """The connection of one HTTP exchange; hang_up() ends it from any thread, once it is made.

    Nothing waits for a look-up of a name or for a server's first answer to a SYN: whoever has hung
    up leaves that thread behind, which ends by itself.
    """

    def __init__(self):
        self.handles, self.hung_up = [], False

    def hold(self, sock):
        """Takes note of the socket that urllib3 has made; -> the same."""
        self.handles.append(sock.dup())  # outlives TLS, which takes the socket object away
        if self.hung_up:  # before there was a handle to shut
            self.hang_up()
            sock.close()
            raise OSError("hung up")
        return sock

    def hang_up(self):
        """Ends it: whoever waits for its next byte is woken by an error."""
        import socket
        self.hung_up = True
        while self.handles:
            handle = self.handles.pop()
            try:
                handle.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # already gone
            handle.close()


def need_requests():
    """The package, imported when it is needed, as that takes longer than all else. Raises
    MMError("config").
    """
    try:
        import requests
    except (ImportError, OSError) as error:  # OSError: in mm.pyz, no place for the certificates
        raise MMError("config", f"mm needs the package requests ({one_line(error, 200)}): "
                      f"{sys.executable} -m pip install requests, or uv run mm.py") from None
    return requests


def adapter_for(connection, proxy):
    """requests' HTTPAdapter, but the socket that urllib3 makes for it is shown to a Connection.

    An adapter has a manager of pools, and one for each proxy; a pool makes urllib3's connections,
    and those make their socket in _new_conn. A pool for SOCKS goes its own way.
    """
    from requests.adapters import HTTPAdapter
    from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

    def shown(pool_class):
        def make_connection(*args, **kwargs):
            made = pool_class.ConnectionCls(*args, **kwargs)
            dial = made._new_conn
            made._new_conn = lambda: connection.hold(dial())
            return made

        def make_pool(*args, **kwargs):
            pool = pool_class(*args, **kwargs)
            pool.ConnectionCls = make_connection
            return pool
        return make_pool

    adapter = HTTPAdapter()
    pools = {"http": shown(HTTPConnectionPool), "https": shown(HTTPSConnectionPool)}
    adapter.poolmanager.pool_classes_by_scheme = pools
    if proxy and not proxy.lower().startswith("socks"):
        manager_for = adapter.proxy_manager_for

        def proxy_manager_for(*args, **kwargs):
            manager = manager_for(*args, **kwargs)
            manager.pool_classes_by_scheme = pools
            return manager

        adapter.proxy_manager_for = proxy_manager_for
    return adapter


def open_session(connection, url):
    """A requests.Session whose sockets come from `connection`, and the proxy it uses for `url` (or
    "").

    Neither ~/.netrc nor the proxy variables are left to requests: netrc would replace the key, and
    a proxy would be asked for loopback.
    """
    requests = need_requests()
    session = requests.Session()
    session.trust_env = False
    # as curl, uv and requests read them; the last one that is set counts
    for name in ("SSL_CERT_DIR", "SSL_CERT_FILE", "CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE"):
        if os.environ.get(name):
            session.verify = os.environ[name]
            if not os.path.exists(session.verify):
                raise MMError("config", f"${name} names {session.verify}, which is not there")
    proxy = ""
    if not is_near(urlsplit(url).hostname or ""):
        session.proxies = requests.utils.get_environ_proxies(url)
        proxy = requests.utils.select_proxy(url, session.proxies) or ""
    adapter = adapter_for(connection, proxy)
    session.mount("http://", adapter)
    session.mount("https://", adapter)
    return session, proxy


def is_near(host):
    """Loopback and Docker's own names: never through a proxy."""
    return host == "localhost" or host.endswith((".localhost", ".docker.internal")) or host == "::1" or \
        re.fullmatch(r"127(\.\d+){1,3}", host) is not None


def body_pieces(raw):
    """The body of urllib3's response `raw` as it arrives: at most 16 KiB a piece, b"" never.

    The pieces are what is left after HTTP's chunking, before any decoding.
    """
    read1 = getattr(getattr(raw, "_fp", raw), "read1", None)  # http.client's waits for a byte only
    if read1 is None:  # urllib3 has moved it: a byte at a time is slow, and right
        yield from raw.stream(1, decode_content=False)
        return
    while True:
        piece = read1(1 << 14)
        if not piece:
            return
        yield piece


def unpacked(pieces):
    """Undoes gzip where a body is gzip, whatever its headers say.

    mm asks for no compression, since a compressed stream comes in lumps; some proxies compress all
    the same. No text begins with gzip's first byte.
    """
    inflate = None
    for number, piece in enumerate(pieces):
        if number == 0 and piece[:1] == b"\x1f":
            import zlib
            inflate = zlib.decompressobj(32 + zlib.MAX_WBITS)  # gzip or zlib, as its head says
        if inflate:
            try:
                piece = inflate.decompress(piece)
            except zlib.error:
                raise MMError("protocol", "the server compressed the stream, and broke it: "
                                          "mm asks for no compression") from None
        if piece:
            yield piece


def beginning(response, most):
    """The first bytes of a body, whatever becomes of the rest."""
    raw = b""
    try:
        for piece in unpacked(body_pieces(response.raw)):
            raw += piece
            if len(raw) > most:
                break
    except Exception:  # an error page that is itself broken still tells something
        pass
    return raw


def fetch(connection, backend, path, body=None):
    """GETs `path` below the base URL (below the server's root if it begins with "/").

    body: JSON that is posted instead. -> (status, JSON or None); where nothing answered, (0, an
    MMError which says why).
    """
    status, data, proxy = 0, None, ""
    method = "POST" if body else "GET"
    try:
        session, proxy = open_session(connection, backend.url)
        with session, session.request(method, backend.endpoint(path), json=body, stream=True,
                                      headers=backend.headers(), allow_redirects=False,
                                      timeout=PROBE_SECONDS) as response:
            status = response.status_code
            data = read_json(decoded(beginning(response, MAX_LIST)))
    except MMError as error:
        data = error
    except Exception as error:  # the probe only advises: a page that cannot be read is not there
        if not status:
            data = explain_exception(error, backend, proxy, False)
            data.message = backend.redact(data.message)
    finally:
        connection.hang_up()
    return status, data


def first_good(asked, accept):
    """Fetches [(backend, path[, body]), …] side by side, each in a thread of its own.

    -> (index, status, JSON) of the first in the list's order whose answer passes accept(status,
    JSON), or None. Those before it are waited for until they have failed, or PROBE_SECONDS are
    over; a thread that still looks up a name is left behind.
    """
    answers, connections = {}, [Connection() for _ in asked]

    def ask(index):
        answers[index] = fetch(connections[index], *asked[index])

    threads = [threading.Thread(target=ask, args=(index,), daemon=True)
               for index in range(len(asked))]
    deadline = time.monotonic() + PROBE_SECONDS
    for thread in threads:
        thread.start()
    found = None
    for index, thread in enumerate(threads):
        thread.join(max(0.0, deadline - time.monotonic()))
        if index in answers and accept(*answers[index]):
            found = (index, *answers[index])
            break
    for connection in connections:
        connection.hang_up()
    return found


def model_ids(status, data):
    """The ids of a model list, those that are loaded and chat first; None if it is no model list.
    """
    entries = data.get("data", "") if isinstance(data, dict) and status == 200 else ""
    if not isinstance(entries, (list, type(None))):
        return None
    entries = [entry for entry in entries or []  # Ollama without models says data: null
               if isinstance(entry, dict) and isinstance(entry.get("id"), str)]

    def rank(entry):
        state = entry.get("status")  # of llama.cpp's router
        unloaded = isinstance(state, dict) and state.get("value") == "unloaded"
        return unloaded, "embed" in entry["id"].lower()

    return [clean(entry["id"]) for entry in sorted(entries, key=rank)]


def same_model(a, b):
    """Whether two names mean one model to the servers that shorten them (Ollama, DMR): `:latest`,
    `ai/`, case.
    """
    def plain(name):
        name = name.lower().replace("hf.co/", "huggingface.co/", 1)
        return re.sub(r"^ai/|:latest$", "", name)
    return plain(a) == plain(b)


# -- a server, and how its URL is written

class Backend:
    """A server that is ready to be asked: name, url (a base URL), query, model, key; `entry` is its
    row of PROVIDERS.

    plain: it has no such row, as only its URL is known.
    """

    def __init__(self, name, entry, url="", model="", key=""):
        self.name, self.plain, self.model, self.key = name or "server", not name, model, key
        self.entry = {**ENTRY_DEFAULTS, **entry}
        self.url, self.query = base_url(url or self.entry["url"])

    def endpoint(self, path):
        """The URL of a path below the base URL; below the server's root if it begins with "/"."""
        base = self.url
        if path.startswith("/"):
            base = re.sub(r"(/engines(/llama\.cpp)?)?/v1$", "", base)
        url = f"{base}/{path.lstrip('/')}".replace("{model}", quoted(self.model))
        if self.query:
            url += ("&" if "?" in path else "?") + self.query
        return url

    def headers(self):
        """Identity, since a compressed stream comes in lumps; a local server gets a dummy key, as
        some insist on one.
        """
        headers = {"Accept-Encoding": "identity", "User-Agent": f"mm/{__version__}"}
        if self.key or self.entry["local"]:
            headers["Authorization"] = f"Bearer {self.key or 'none'}"
        return headers

    def refusal_looks(self):
        """(name, what a refusal of it looks like) of each optional request field."""
        for name in self.entry["fields"]:
            yield name, rf"\b{name}\b"
        for name in self.entry["thinking"].get("off", {}):
            yield name, rf"\b{name}\b|does not support thinking"

    def redact(self, text):
        """`text` without the key, and without what a URL can hold that is secret, however a server
        echoes them. A dummy key (none, ollama) is no secret, and can stand in any sentence.
        """
        parts = urlsplit(self.url)
        for secret in (self.key, parts.password or parts.username, self.query):
            if secret and not re.fullmatch("[A-Za-z_-]{1,12}", secret):
                text = text.replace(secret, "***").replace(json.dumps(secret)[1:-1], "***")
        return text

    def key_advice(self):
        variable = self.entry.get("apiKeyEnv") or "MM_API_KEY"
        return f"the key came from ${variable}" if self.key else f"no key was sent: set ${variable}"

    def get_advice(self):
        return (self.entry["get"] or "mm --models lists what it has").format(model=self.model)

    def start_advice(self):
        start = self.entry["start"].format(port=urlsplit(self.url).port or 80)
        advice = f"start it with `{start}`" if start else "is it running, and is the URL right?"
        return advice + self.container_advice()

    def container_advice(self):
        host = urlsplit(self.url).hostname or ""
        if not in_container() or not is_near(host) or host.endswith(".docker.internal"):
            return ""
        return "; inside a container, localhost is the container: the host is host.docker.internal"


def in_container():
    return os.path.exists("/.dockerenv") or os.path.exists("/run/.containerenv")


def quoted(text):
    from urllib.parse import quote
    return quote(text, safe="")


def base_url(text):
    """-> (base URL, query) from whatever form of it a person has. A path of its own is kept as it
    is. Raises MMError("config").

    8080, box:8080, box -> http://box[:8080]/v1 · api.example.com -> https://api.example.com/v1 · a
    slash too many goes, and so does the /chat/completions of a whole endpoint.
    """
    url = text.strip()
    if re.fullmatch(r":?\d{2,5}(/.*)?", url):  # a port alone
        url = "localhost:" + url.lstrip(":")
    if "://" not in url:
        host = re.split(r"[/:?]", url.lstrip("["))[0]
        has_port = re.match(r"\[|[^/?]*:\d", url)
        local = has_port or is_near(host) or re.fullmatch(r"[^.]*|[\d.]+", host)
        url = ("http://" if local else "https://") + url
    try:
        parts = urlsplit(url)
        good = parts.scheme.lower() in ("http", "https") and parts.hostname
        parts.port  # raises when it is no port
    except ValueError:
        good = False
    if not good or re.search(r"\s", url):
        shown = re.sub(r"//[^/]*@", "//***@", url.partition("?")[0])
        raise MMError("config", f"{one_line(shown, 80)} is not an http(s) URL")
    path = re.sub(r"/+", "/", parts.path).rstrip("/")
    path = re.sub(r"/(chat/completions|completions|models)$", "", path)
    return urlunsplit((parts.scheme.lower(), parts.netloc, path or "/v1", "", "")), parts.query


# -- which server is used, and which model

def provider_table(settings):
    """PROVIDERS with the config's own entries and overrides. Raises MMError("config")."""
    table = dict(PROVIDERS)
    for name, own in settings["providers"].items():
        where = f"{settings.source('providers')}.{name}"
        like = own.get("like", name)
        if like not in PROVIDERS and "like" in own:
            raise MMError("config", f"{where}.like: no provider is called {one_line(like, 40)}: "
                          + ", ".join(PROVIDERS))
        table[name] = {**PROVIDERS.get(like, PLAIN), **own}
        if "url" in own:
            blaming(f"{where}.url", base_url, own["url"])
            # another machine's fallback is no fallback
            table[name]["fallback"] = own.get("fallback", [])
        if not table[name]["url"]:
            raise MMError("config", f"{where}: wants a url, or `like: NAME`")
    return table


def named_backend(settings, environ=os.environ):
    """-> (Backend, [notices]) of the server that is named by a provider or a URL, or (None, []). No
    server is asked.

    Raises MMError("config").
    """
    table, notices = provider_table(settings), []
    name, url = settings["provider"].strip(), settings["url"].strip()
    if name and name not in table:
        raise MMError("config", f"{settings.source('provider')}: no provider is called "
                      f"{one_line(name, 40)}{did_you_mean(name, table)}: {', '.join(table)}")
    if name and settings.source("url") == "$MM_BASE_URL" and \
            settings.source("provider") != "$MM_PROVIDER":
        # or the provider's key, and a conversation held with it, would go there
        notices.append(f"{settings.source('provider')} {name} puts $MM_BASE_URL aside")
        url = ""
    if not name and not url:
        return None, []
    if url and not name:
        # The port tells which server it is, of mm's own alone: a key that the config names for
        # another must not follow its port to any host.
        port = urlsplit(blaming(settings.source("url"), base_url, url)[0]).port
        ports = {urlsplit(place).port: name for name, entry in PROVIDERS.items()
                 for place in [entry["url"], *entry.get("fallback", [])]}
        name = ports[port] if port in ports and port else ""
        table = PROVIDERS
    entry = table[name] if name else PLAIN
    if url:
        entry = {**entry, "fallback": []}
    return with_key(Backend(name, entry, url), environ), notices


def resolve(settings, environ=os.environ, needs_model=True, named=None):
    """-> (Backend, [notices]). Looks for local servers when none is named, and for a model on the
    server when none is.

    named: what named_backend() gave, where it was called already. Raises MMError: config, or what
    the search for a server or a model ended with.
    """
    backend, notices = named or named_backend(settings, environ)
    ids = None
    if not backend or backend.entry["fallback"]:
        backend, ids = answering(backend, provider_table(settings), environ, notices)
    own_url = PROVIDERS.get(backend.name, PLAIN)["url"]
    is_hosted = not backend.entry["local"] and backend.url == own_url
    if is_hosted and needs_model and not backend.key:
        raise MMError("config", f"{backend.name} wants a key: set ${backend.entry['apiKeyEnv']}")
    backend.model = settings["model"].strip() or backend.entry["model"]
    if needs_model and not backend.model:
        backend.model = first_model(backend, ids)
        notices.append(f"using the model {backend.model}")
    return backend, notices


def with_key(backend, environ):
    """The Backend with the key that its variable holds. Raises MMError("config")."""
    variable = backend.entry.get("apiKeyEnv") or ""
    backend.key = environ.get(variable, "").strip()
    odd = re.search("[^!-~]", backend.key)
    if odd:
        raise MMError("config", f"${variable}: character {odd.start() + 1} of the key is one that "
                      "an HTTP header cannot carry: copy the key anew")
    return backend


def answering(named, table, environ, notices):
    """The first server that answers, of all that may be meant, asked side by side.

    named: the Backend that was named, and so tried at its fallback URLs too; None for any local
    server that lists a model, the hosts of containers last. -> (Backend, its model ids, None if not
    told).
    """
    if named:
        candidates = [named] + [Backend(named.name, named.entry, url, key=named.key)
                                for url in named.entry["fallback"]]
    else:
        # a key goes to none of them before one is chosen
        candidates = [Backend(name, entry, url)
                      for name, entry in table.items() if entry.get("local")
                      for url in [entry["url"], *entry.get("fallback", [])]]
        candidates.sort(key=lambda backend: ".docker.internal" in backend.url)

    def is_meant(status, data):
        return status > 0 if named else bool(model_ids(status, data))

    asked = [(backend, "models") for backend in candidates]
    found = first_good(asked, is_meant)
    if not found and not named:
        found = first_good(asked, lambda status, data: status in (401, 403))
    if found:
        backend = with_key(candidates[found[0]], environ)
        if backend is not named:
            notices.append(f"using {backend.name} at {show_url(backend.url)}")
        return backend, model_ids(*found[1:])
    if named:
        return named, None
    ports = {backend.name: urlsplit(backend.entry["url"]).port for backend in candidates}
    start = "start one, such as `llama-server -m MODEL.gguf`"
    if in_container():
        start = "in a container, start one on the host"
    raise MMError("unreachable", "no model server answers here ("
                  + ", ".join(f"{name} :{port}" for name, port in ports.items())
                  + f"): {start}, or name one with --url or -p; mm --demo needs none")


def takes_first_model(backend):
    """Whether neither a model nor a key need be named: the user's own server, not a hosted one."""
    return backend.entry["local"] or backend.plain


def first_model(backend, ids):
    """The model to use where none is named. ids: those of the server's list, None if not asked."""
    if ids is None and takes_first_model(backend):
        status, data = ask_models(backend)
        ids = model_ids(status, data)
        if ids is None:
            raise no_models_error(backend, status, data)
    if ids:
        return ids[0]
    if ids == [] and backend.entry["local"]:
        get = backend.entry["get"].format(model="MODEL")
        raise MMError("not_found", f"{backend.name} at {show_url(backend.url)} has no model: {get}")
    own = "" if backend.name in PROVIDERS else ", or local: true in the config: then its first is used"
    raise MMError("config", "no model is named: say -m MODEL "
                  f"(mm --models lists those of {backend.name}){own}")


def ask_models(backend):
    """-> (status, model list) or (0, MMError)."""
    found = first_good([(backend, "models")], lambda status, data: True)
    slow = MMError("unreachable", f"{show_url(backend.url)} took the connection and gave no model "
                   f"list within {PROBE_SECONDS:g} s: is it busy? (-m MODEL needs none)")
    return found[1:] if found else (0, slow)


def no_models_error(backend, status, data):
    """MMError for a server that gave no model list but this (see ask_models)."""
    if not status and data.kind == "interrupted":
        message = compose(f"{show_url(backend.url)}: {data.message}", "", backend.start_advice())
        return MMError("unreachable", message)
    if not status:
        return data
    where, code = show_url(backend.endpoint("models")), f"HTTP {status}"
    if status in (401, 403):
        refuses = "refuses the key" if backend.key else "wants a key"
        return MMError("auth", compose(f"{where} {refuses}", code, backend.key_advice()))
    advice = "is the URL right (most end in /v1)?"
    return MMError("not_found", compose(f"{where} gives no model list", code, advice))


# -- what a server says of itself

def dig(data, path, model):
    """What stands at a dotted path in JSON, or None. [] is the list's entry for `model`, or its
    only one.
    """
    for key in path.split("."):
        if key == "[]":
            entries = [e for e in data if isinstance(e, dict)] if isinstance(data, list) else []
            data = entries[0] if len(entries) == 1 else None
            for entry in entries:
                names = (entry.get(key, "") for key in ("id", "model", "name", "key", "Model"))
                if any(same_model(str(name), model) for name in names):
                    data = entry
                    break
        elif isinstance(data, list) and key.isdigit():
            data = data[int(key)] if int(key) < len(data) else None
        else:
            data = data.get(key) if isinstance(data, dict) else None
    return data


def unknown_model(backend, ids):
    """What to say of a model that is not in a server's list, or ""."""
    if not ids or any(same_model(name, backend.model) for name in ids):
        return ""
    return f"{backend.model} is not among the server's models{did_you_mean(backend.model, ids)}"


def fetch_page(backend, path, *body):
    """The JSON of an answer with status 200, or None. body: JSON to post, if any."""
    found = first_good([(backend, path, *body)], lambda status, data: status == 200)
    return found and found[2]


def probe(backend):
    """What a server says of itself, for advice.

    models: [ids] or None; fault: an MMError where there are none; window: the context it serves in
    tokens, or 0; tools: whether the model's template takes tools, or None where that is not told.
    """
    status, data = ask_models(backend)
    about = {"models": model_ids(status, data), "fault": None, "window": 0, "tools": None}
    if about["models"] is None:
        about["fault"] = no_models_error(backend, status, data)
        return about
    pages = {"models": data}

    def read(path, keys):
        if path not in pages:
            pages[path] = fetch_page(backend, path)
        return dig(pages[path], keys, backend.model)

    for path, keys in backend.entry["window"]:
        about["window"] = about["window"] or as_int(read(path, keys))
    if backend.entry["tools"]:
        tools = read(*backend.entry["tools"])
        about["tools"] = tools if isinstance(tools, bool) else None
    return about


# ==================================================================================================
# 4. The wire
#
# A stream is bytes, split into lines, grouped into events, each a JSON chunk, each some deltas. The
# lines are split by requests' own iter_lines, which reads from a Tap in the place of response.raw:
# left to itself, it holds a token of an unchunked body back until 512 bytes have come. Lines are
# decoded one by one as UTF-8: guessing Latin-1 turns the last byte of a check mark into a line end.
# A stream is whole only with a finish_reason or [DONE]; a tidy close in the middle is a broken
# stream like any other.
# ==================================================================================================

# bytes; nothing an honest server sends in one line, one body or all the calls of one answer comes
# near
MAX_LINE = 8 << 20
CALL_BYTES = 1 << 10  # what an empty call takes of that


class Tap:
    """Stands in the place of response.raw: requests' iter_lines reads from it what has arrived.

    raw: urllib3's response, or any object with read1(). file: gets each byte as it came (--tap);
    one that can no longer be written is told once through `notice`, and the stream goes on.
    """

    def __init__(self, raw, file=None, notice=None):
        self.raw, self.file, self.notice = raw, file, notice
        self.pieces = unpacked(self.recorded(body_pieces(raw)))
        self.after_cr = False
        self.line_bytes = 0  # of the line that has not ended yet

    def recorded(self, pieces):
        for piece in pieces:
            if self.file:
                try:
                    self.file.write(piece)
                    self.file.flush()
                except OSError as error:
                    self.notice(f"--tap stops here: {error.strerror}")
                    self.file = None
            yield piece

    def read(self, size=-1):
        """The next piece, whatever its size; b"" at the end. Raises MMError for an endless line."""
        for piece in self.pieces:
            # CR LF, cut between two reads, is one end of a line
            if self.after_cr and piece[:1] == b"\n":
                piece = piece[1:]
            self.after_cr = piece.endswith(b"\r")
            if not piece:
                continue
            end = max(piece.rfind(b"\n"), piece.rfind(b"\r"))
            self.line_bytes = len(piece) - end - 1 + (self.line_bytes if end < 0 else 0)
            if self.line_bytes > MAX_LINE:
                raise MMError(
                    "protocol", f"the server sent a line of more than {MAX_LINE >> 20} MiB"
                )
            return piece
        return b""

    def close(self):
        self.pieces.close()  # it holds this Tap, as this Tap holds it: both would stay in memory
        self.raw.close()


def events(rows):
    """SSE events as (name, data lines, at_end); at_end: it may be torn, as the stream ended within
    it.

    rows: lines without their ends. A body that is no event stream is given whole, named "body".
    https://html.spec.whatwg.org/multipage/server-sent-events.html
    """
    name, data, size = "", [], 0
    stray = []  # lines before the first event: perhaps of a body that is no event stream
    is_stream = False
    for line in rows:
        if not is_stream and line.startswith(b"\xef\xbb\xbf"):
            line = line[3:]
        field, _, value = line.partition(b":")
        if value[:1] == b" ":
            value = value[1:]
        if not line and (data or name):
            yield name, data, False
            name, data, size = "", [], 0
        elif field in (b"data", b"event", b"error"):
            if stray and stray[0].lstrip()[:1] in (b"{", b"["):  # JSON, and then [DONE] as an event
                yield "body", [b"\n".join(stray)], True
            is_stream, stray = True, []
            if field == b"data":
                data.append(value)
                size += len(value) + 100  # what an empty one takes in memory, and more
            elif field == b"event":
                name = value.decode("utf-8", "replace").strip()
            else:  # older llama.cpp: an error as a field of its own
                yield "error", [value], False
        elif is_stream and field[:1] == b"{":  # a proxy's error, written into the stream as it is
            yield name, [line], False
        elif not is_stream and (stray or field not in (b"", b"id", b"retry")):
            stray.append(line)
            size += len(line) + 100
        # else a comment (no name before the colon), or a field that says nothing of the answer
        if size > MAX_LINE:
            raise MMError("protocol", "the server sent an event, or a body, of more than "
                                      f"{MAX_LINE >> 20} MiB")
    if data or name:
        yield name, data, True
    elif stray:
        yield "body", [b"\n".join(stray)], True


# -- from events to deltas

DONE = object()  # stands for [DONE], or what other servers write for it, among an event's values
END_MARKS = re.compile(rb'(?i)"?(\[(done|end)\]|done|end)"?')
# finish_reasons by which a server says that it has failed (vLLM, Z.ai, DeepSeek, …)
GIVEN_UP = (r"(?i)error|abort|fail|insufficient|unavailable|overload|time.?out|cancel"
            r"|network|lost|exception|interrupt|terminated|preempt")


def deltas(rows, backend, url):
    """Deltas (kind, value) of a response's lines, each as soon as its line is there. Raises
    MMError.

    reasoning, answer: text · call: a fragment {"index", "id", "name", "arguments"} of a tool call ·
    progress: (processed, total) prompt tokens beyond the cached ones · finish: finish_reason, and
    "" for [DONE] · usage, timings: dict · model, id: text · extra: fields that only this server knows ·
    media: what else the answer is. After [DONE] it ends, without waiting for the connection to close.

    One event that cannot be read does not undo a stream that ends well. After a finish_reason, what
    becomes of the connection does not matter.
    """
    stream = StreamReader()
    fault = None
    try:
        for name, data, at_end in events(rows):
            stream.is_empty = False
            read = json_body(data[0], backend, url) if name == "body" else json_values(data)
            for value in read:
                if value is DONE:
                    yield "finish", ""
                    return
                if isinstance(value, dict):
                    yield from stream.read(name, value, backend, url)
                elif isinstance(value, bytes) and not at_end and name in ("", "message", "error"):
                    fault = fault or unreadable(value, backend, url)
    except MMError:
        raise
    except Exception:
        if not stream.is_complete:
            raise
    if fault and not stream.is_complete:
        raise fault
    stream.end()


class StreamReader:
    """What the chunks of one stream have told so far, for what the next one means."""

    def __init__(self):
        self.is_empty, self.is_complete = True, False
        self.has_deltas = False
        self.halves, self.told = {}, set()

    def read(self, name, chunk, backend, url):
        """The deltas of a chunk. Raises MMError for one that is an error."""
        choices = chunk.get("choices")
        choices = choices if isinstance(choices, list) else []
        choices = [choice for choice in choices if isinstance(choice, dict)]
        for choice in choices:
            if choice.get("error"):
                raise explain(0, choice["error"], backend, url)
        if is_error(name, chunk):
            raise explain(0, chunk, backend, url)
        for choice in choices:
            # all of an answer: of a server that does not stream, or once more behind its deltas
            if choice.get("message"):
                self.is_complete = True
                if self.has_deltas and not choice.get("delta"):
                    continue
            for kind, value in read_choice(choice):
                if kind in ("reasoning", "answer"):
                    value = without_halves(value, kind, self.halves)
                if value:
                    yield kind, value
            self.has_deltas = self.has_deltas or bool(choice.get("delta"))
        yield from self.read_rest(chunk)
        # last, as the watchdog waits but a moment for what comes after it
        for choice in choices:
            yield from self.read_finish(choice)

    def read_rest(self, chunk):
        """What a chunk tells beside its choices. null means absent, everywhere."""
        progress = chunk.get("prompt_progress")
        if isinstance(progress, dict):
            processed, total = as_int(progress.get("processed")), as_int(progress.get("total"))
            cached = as_int(progress.get("cache"))
            yield "progress", (processed - cached, total - cached)
        for key in ("model", "id"):  # in every chunk, and always the same
            if key not in self.told and isinstance(chunk.get(key), str):
                self.told.add(key)
                yield key, chunk[key]
        for key in ("usage", "timings"):
            if isinstance(chunk.get(key), dict):
                yield key, chunk[key]

    def read_finish(self, choice):
        """The end of a choice. Raises MMError for one that says that the server has failed."""
        finish = choice.get("finish_reason")
        # an empty one means that there is none, as some write it
        if not isinstance(finish, str) or finish in ("", "null"):
            return
        if not is_first(choice) and finish != "tool_calls":
            return
        if re.search(GIVEN_UP, finish):
            raise MMError("server", "the server gave the answer up "
                          f"(finish_reason {one_line(finish, 60)})", "stream")
        self.is_complete = True
        yield "finish", finish

    def end(self):
        if not self.is_complete:
            message = "the stream ended before the answer was complete"
            if self.is_empty:
                message = "the server sent an empty answer and closed the connection"
            raise MMError("interrupted", message, "stream")


def json_values(data):
    """The JSON values of an event's data lines: joined, as SSE says, else one by one, as some
    gateways mean it. What is no JSON is given as its bytes.
    """
    text = b"\n".join(data).strip()
    if text[:1] != b"{" and END_MARKS.fullmatch(text):
        return [DONE]
    if not text or text[:1] == b":":
        return []  # a gateway has wrapped another server's comment
    try:
        return [read_json(text.decode("utf-8", "replace"))]
    except ValueError:
        if len(data) > 1:
            return [value for line in data for value in json_values([line])]
        return [text]


def unreadable(raw, backend, url):
    """MMError for the data of an event that is no JSON: a broken one, or an error in words."""
    text = raw.decode("utf-8", "replace")
    if text.startswith(("{", "[")):
        return MMError("protocol", "the server sent an event that is not JSON: "
                       + one_line(backend.redact(text), 120), "stream")
    return explain(0, text, backend, url)


def json_body(body, backend, url):
    """[The JSON value] of a body that is no event stream.

    It comes from a server that ignores `stream`, or that errs with status 200.
    """
    text = decoded(body).strip()
    try:
        return [read_json(text)]
    except ValueError:
        title = page_title(text)
    if title is not None:
        raise web_page_error(backend.redact(title), url)
    if text.startswith(("{", "[")):
        return []  # torn, which the missing end tells
    raise MMError("protocol", f"{url} answered with something that is no event stream: "
                              f"{one_line(backend.redact(text[:4000]), 120)}")


def is_error(name, value):
    """Whether a JSON value is an error, in any of the forms that llama.cpp, vLLM, LM Studio,
    SGLang, MiniMax (base_resp) and gateways give it.
    """
    error, base = value.get("error"), value.get("base_resp")
    if isinstance(error, dict):  # some send one of empty fields in each chunk
        error = any(error.values())
    if name == "error" or error or "error" in (value.get("type"), value.get("object")):
        return True
    if isinstance(base, dict) and base.get("status_code"):
        return True
    if value.get("choices"):
        return False
    if value.get("success") is False or "detail" in value:
        return True
    succeeded = value.get("code") in (None, "", 0, 200, "0", "200", "success", "Success")
    return not succeeded and ("message" in value or "msg" in value)


def is_first(choice):
    """With `n` above 1, the answer of none but the first choice is shown."""
    return choice.get("index") in (None, 0, "0")


def read_choice(choice):
    """The deltas of a choice of a chat.completion(.chunk) or text_completion, but for its end."""
    delta = choice.get("delta") or choice.get("message") or choice
    if not isinstance(delta, dict):
        return
    if is_first(choice):
        yield from read_delta(delta)
    if delta.get("tool_calls") or delta.get("function_call"):
        # calls can stand in a second choice
        yield from read_calls(delta, "" if is_first(choice) else f"{choice['index']}:")


def read_delta(delta):
    """The thinking and the answer in a delta."""
    content = delta.get("content") or delta.get("text") or delta.get("refusal")
    answer, reasoning = text_parts(content)
    # the same text twice, on some servers
    for key in ("reasoning_content", "reasoning", "reasoning_details", "thinking"):
        text = "".join(text_parts(delta[key])) if delta.get(key) else ""
        if text:
            reasoning = text
            break
    if reasoning:
        yield "reasoning", reasoning
    # some gateways copy thinking into content; a newline may be both
    if answer and (answer != reasoning or answer.isspace()):
        yield "answer", answer
    if isinstance(content, list) or not OTHER_KEYS.isdisjoint(delta):
        yield from read_others(delta, content)


# looked at only where one is there: a stream has many deltas
OTHER_KEYS = {"reasoning_details", "extra_content", "image", "images", "audio", "audios"}


def read_others(delta, content):
    """What a delta holds beside text and calls: fields that only its server knows, and media."""
    parts = content if isinstance(content, list) else []
    kinds = [str(part.get("type")) for part in parts if isinstance(part, dict)]
    extra = {key: delta[key] for key in ("reasoning_details", "extra_content") if delta.get(key)}
    if extra:
        yield "extra", extra
    for kind in ("image", "audio"):
        if delta.get(kind) or delta.get(f"{kind}s") or any(kind in name for name in kinds):
            yield "media", kind


def read_calls(delta, choice=""):
    """The fragments of tool calls in a delta. choice: what tells their indexes from those of the
    first choice.
    """
    calls = delta.get("tool_calls")
    calls = calls if isinstance(calls, list) else []
    if isinstance(delta.get("function_call"), dict):  # the form before there were several
        calls = [*calls, {"function": delta["function_call"]}]
    for call in calls:
        if not isinstance(call, dict):
            continue
        function = call.get("function") if isinstance(call.get("function"), dict) else {}
        arguments = function.get("arguments")
        if not isinstance(arguments, (str, type(None))):
            arguments = json.dumps(arguments)
        index, call_id, name = call.get("index"), call.get("id"), function.get("name")
        fragment = {"index": f"{choice}{index}" if isinstance(index, int) else None,
                    "id": call_id if isinstance(call_id, str) else "",
                    "name": name if isinstance(name, str) else "",
                    "arguments": arguments or "",
                    "extra": {key: value for key, value in call.items()
                              if key not in ("index", "id", "type", "function") and value}}
        # else it is no call, and no sign of life
        if fragment["id"] or fragment["name"] or fragment["arguments"]:
            yield "call", fragment


def text_parts(value):
    """(text, thinking) of content that is text, a part, or a list of typed parts; unknown parts are
    skipped.
    """
    if isinstance(value, str):
        return value, ""
    if isinstance(value, list):
        pairs = [text_parts(part) for part in value]
        return "".join(text for text, _ in pairs), "".join(thought for _, thought in pairs)
    if not isinstance(value, dict):
        return "", ""
    for key in ("thinking", "reasoning"):
        if key in value:
            return "", "".join(text_parts(value[key]))
    return text_parts(value.get("text") or value.get("summary") or value.get("content"))


def without_halves(text, kind, halves):
    """`text` without lone surrogates. One that ends a delta waits in `halves` for the other half in
    the next.
    """
    text = halves.pop(kind, "") + text if halves else text
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        if "\ud800" <= text[-1] <= "\udbff":
            halves[kind], text = text[-1], text[:-1]
        return clean(text)


# -- tool calls

class Calls:
    """Puts the fragments of an answer's tool calls together.

    Servers give all parallel calls index 0, count the index up within a call, leave ids out, repeat
    them, or repeat the name; so a fragment opens a new call only if it says something that the call
    it would continue cannot be.
    """

    def __init__(self):
        self.calls, self.by_index, self.size = [], {}, 0

    def add(self, fragment):
        call = self.continued(fragment)
        if call is None:
            call = {"id": fragment["id"], "name": fragment["name"], "arguments": [], "extra": {}}
            self.calls.append(call)
            self.size += CALL_BYTES
        if fragment["index"] is not None:
            self.by_index[fragment["index"]] = call
        call["id"] = call["id"] or fragment["id"]
        call["name"] = call["name"] or fragment["name"]
        call["extra"].update(fragment.get("extra", {}))
        if fragment["arguments"]:
            call["arguments"].append(fragment["arguments"])
            self.size += len(fragment["arguments"])
        if self.size > MAX_LINE:
            raise MMError("protocol", f"the tool calls of one answer passed {MAX_LINE >> 20} MiB")

    def continued(self, fragment):
        """The open call that a fragment belongs to, or None if it begins one."""
        index, its_id, name = fragment["index"], fragment["id"], fragment["name"]
        call = self.by_index.get(index) or (self.calls[-1] if self.calls else None)
        if index is None and its_id:
            call = next((c for c in self.calls if c["id"] == its_id), call)
        # arguments alone: the usual fragment; the index of some counts up within a call
        if call is None or not (its_id or name):
            return call
        known_place = index is None or index in self.by_index  # else an index that is new
        # what cannot begin a JSON object goes on with one
        begins = fragment["arguments"].lstrip()[:1] in ("", "{", '"')
        is_complete = begins and self.is_complete(call)
        if its_id and call["id"]:
            if its_id != call["id"]:  # another call, also where all have index 0
                return None
            # the id repeated: in each fragment, or for each call
            return call if known_place or not is_complete else None
        # no ids: the name tells where a call begins
        if name and call["name"] and (name != call["name"] or is_complete):
            return None
        return call if known_place or not call["name"] else None  # an id that comes late, or a name

    @staticmethod
    def is_complete(call):
        """Looked at for each fragment that repeats the name, so what cannot be the end of a JSON
        object is not parsed.
        """
        arguments = call["arguments"]
        may_be = arguments and arguments[-1].rstrip()[-1:] in ("", "}", '"')
        return bool(may_be) and parse_arguments("".join(arguments)) is not None

    def finished(self):
        """[{"id", "name", "arguments" (a dict, or None if they are no complete JSON object),
        "raw"}, …], ids unique.
        """
        done, ids = [], set()
        for place, call in enumerate(self.calls):
            raw = "".join(call["arguments"])
            # nine characters: Mistral insists
            made = (f"call{number:05d}" for number in range(place, 1 << 20))
            its_id = call["id"] if call["id"] and call["id"] not in ids else next(name for name in made if name not in ids)
            ids.add(its_id)
            done.append(
                {
                    "id": clean(its_id),
                    "name": clean(call["name"]),
                    "arguments": parse_arguments(raw),
                    "raw": clean(raw),
                    "extra": call["extra"],
                }
            )
        return done


def parse_arguments(raw):
    """A call's arguments as a dict; {} for none at all; None if they are not one complete JSON
    object.
    """
    if not raw.strip():
        return {}
    try:
        value = read_json(raw)
        if isinstance(value, str):  # encoded twice
            value = read_json(value)
        value = cleaned(value)  # what is too deep to be sent back is no call
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else {} if value is None else None


# ==================================================================================================
# 5. The watchdog
#
# The reader thread reads and parses; the main thread waits on a queue with a clock. A sign of life
# is a token (thinking, answer, argument of a call) or prompt progress that moves. A ping or an
# empty delta is none: a server whose model died goes on sending those. Clients that count the
# answer alone kill a model that thinks for minutes.
# ==================================================================================================

TOKENS = ("reasoning", "answer", "call")
# for usage and [DONE] after the finish_reason; some servers never send them nor close, and some
# send text after a pause
GRACE_SECONDS = 2.0
BACKLOG = 4000       # deltas the reader may be ahead of a slow terminal or pipe


class ModelCall:
    """One request and its stream.

    open_stream: called in the reader thread with this call's Connection, returns an iterator of
    deltas or raises MMError. watchdog, first_token: the longest silence between tokens and before
    the first one, in seconds; 0 is no limit. Iterating gives the deltas, and ("waiting", seconds
    since the last sign of life) when nothing more is there: right after a delta, with 0.0, so that
    a view can flush what it has, and then each second. stop(), also from a signal handler, makes
    the iteration raise MMError("cancelled"). waits_for_call: a call may come in one piece.
    """

    def __init__(self, open_stream, watchdog, first_token, waits_for_call=False):
        self.open_stream = open_stream
        # while a server may write a call without a sign, the first token's limit is meant for both
        self.waits_for_call = waits_for_call and not 0 < first_token <= watchdog
        if self.waits_for_call:
            watchdog = first_token
        self.limits = {"first": first_token, "next": watchdog, "last": GRACE_SECONDS}
        self.box = queue.SimpleQueue()
        self.connection, self.stopped = Connection(), False

    def stop(self):
        self.stopped = True
        self.wake()

    def wake(self):
        """Makes the iteration give a `waiting` now, so that its caller can act; like stop(), safe
        in a signal handler.
        """
        self.box.put(("waiting", 0.0))

    def read(self):
        """The reader thread: puts deltas into the box, then how it ended (None or an MMError)."""
        ended = None
        try:
            progress = -1
            for kind, value in self.open_stream(self.connection):
                if kind == "progress":
                    if value[0] <= progress:  # it has not moved
                        continue
                    progress = value[0]
                self.box.put((kind, value))
                while self.box.qsize() > BACKLOG and not self.connection.hung_up:
                    time.sleep(0.005)
        except MMError as error:
            ended = error
        except Exception as error:  # a fault of mm's own must not leave the main thread waiting
            ended = MMError(
                "protocol",
                f"mm could not read the stream: {type(error).__name__}: {one_line(error, 200)}",
            )
        self.box.put(("end", ended))

    def __iter__(self):
        threading.Thread(target=self.read, daemon=True).start()
        phase, has_answer, has_finished = "first", False, False
        says_it_always = False  # a finish_reason in each chunk, so that none means the end
        # Seconds waited here since the last sign of life: not those in which mm was stopped, or its
        # output stuck. A delta that is no sign of life does not reset it, so a server that sends
        # nothing else reaches the limit all the same.
        silent = 0.0
        try:
            while True:
                try:
                    kind, value = self.box.get_nowait()  # a fast stream looks at no clock
                except queue.Empty:
                    limit, began = self.limits[phase], time.monotonic()
                    # a second at most: a status line moves
                    patience = min(max(limit - silent, 0.001), 1.0) if limit else 1.0
                    try:
                        kind, value = self.box.get(timeout=patience)
                        silent += min(patience, time.monotonic() - began)
                    except queue.Empty:
                        silent += patience
                        if limit and silent >= limit:
                            if has_finished:
                                return
                            raise stalled_error(silent, phase, self.waits_for_call) from None
                        yield "waiting", silent
                        continue
                if self.stopped:
                    raise MMError("cancelled", "stopped")
                if kind == "end":
                    if value:
                        raise value
                    return
                if kind in TOKENS:
                    says_it_always = says_it_always or has_finished
                    has_answer = has_answer or kind != "reasoning"
                    silent, phase = 0.0, "next"
                elif kind == "progress":
                    silent = 0.0
                elif kind == "finish":
                    silent, has_finished = 0.0, True
                    if has_answer and not says_it_always:
                        phase = "last"
                yield kind, value
                if self.box.empty():
                    yield "waiting", 0.0
        finally:
            self.connection.hang_up()


def stalled_error(silent, phase, waits_for_call):
    """Not asked again: a person has waited for a whole limit already, and a server that is merely
    slow would be so once more.
    """
    silent = f"{silent:.2g}" if silent < 1 else f"{silent:.0f}"
    if phase == "first":
        return MMError(
            "stalled",
            f"nothing came for {silent} s: is the model still loading, or the prompt very long? "
            "--first-token (firstTokenTimeout) sets the limit",
        )
    limit = "--watchdog (watchdogTimeout) sets the limit"
    if waits_for_call:
        limit = f"a call may have been written meanwhile, so --first-token was the limit; {limit}"
    return MMError("stalled", f"the stream fell silent for {silent} s: {limit}")


# ==================================================================================================
# 6. Requests
#
# The one place where a history becomes the messages of a request, so that whatever broke before,
# what goes out is what a strict template takes: one system message, roles that alternate, every
# call with its result, no empty or torn message, no lone surrogates, no thinking but what
# reasoningEcho sends back by its rules. The bytes depend on the conversation alone, so a server's
# prompt cache holds from turn to turn.
# ==================================================================================================

NO_RESULT = "This call was interrupted: there is no result."
NO_ANSWER = "[This turn ended before its answer.]"
NO_QUESTION = "[What was asked here is lost.]"


def to_messages(history, system, backs=None):
    """The messages to send for a history of {"role", "content", "tool_calls", "tool_call_id"} and
    mm's own "origin" (see Echo).

    backs: {index in the history: what goes back with that message} (see Echo.backs()).
    """
    out = [{"role": "system", "content": system}] if system.strip() else []
    waiting = {}  # calls that have no result yet: {id: the id that was sent}

    def close_calls():
        for sent_id in waiting.values():
            out.append({"role": "tool", "tool_call_id": sent_id, "content": NO_RESULT})

    for index, message in enumerate(history):
        role, content = message["role"], message.get("content") or ""
        calls = message.get("tool_calls") or []
        if role == "tool":
            sent_id = waiting.pop(message["tool_call_id"], None)
            if sent_id:  # a result without its call would be refused
                out.append({"role": "tool", "tool_call_id": sent_id, "content": content})
            continue
        close_calls()
        back = (backs or {}).get(index, NOTHING_BACK)
        waiting = {call["id"]: back["ids"].get(call["id"], call["id"]) for call in calls}
        if not content.strip() and not calls:
            continue
        last = out[-1] if out else {"role": "system"}
        # templates that insist on turns do not count calls and results
        if role == "user" and last["role"] == "tool":
            out.append({"role": "assistant", "content": NO_ANSWER})
        elif role == "assistant" and last["role"] == "system":
            out.append({"role": "user", "content": NO_QUESTION})
        elif role == last["role"]:
            # the first one's thinking is left out: it is not what led to the second
            content = f"{out.pop()['content']}\n\n{content}".rstrip()
        sent = {"role": role, "content": content, **back["fields"]}
        if calls:
            sent["tool_calls"] = [sent_call(call, waiting[call["id"]], back["calls"])
                                  for call in calls]
        out.append(sent)
    close_calls()
    return out


# of a message of which only what every server takes is sent
NOTHING_BACK = {"fields": {}, "calls": {}, "ids": {}}


def sent_call(call, sent_id, extras):
    """A call as a request holds it. extras: {call id: fields that its server added}."""
    # what a model made up as a name can hold what no server takes back (Anthropic, OpenAI)
    name = re.sub(r"[^A-Za-z0-9_-]", "_", call["name"])[:64] or "unnamed"
    arguments = json.dumps(call["arguments"] or {}, ensure_ascii=False)
    return {"id": sent_id, "type": "function",
            "function": {"name": name, "arguments": arguments}, **extras.get(call["id"], {})}


def foreign_id(call_id):
    """The id of a call for a server that did not make it: nine letters and digits, as Mistral
    insists; Bedrock takes no dots or colons.
    """
    import zlib
    if re.fullmatch("[A-Za-z0-9]{9}", call_id):
        return call_id
    return f"c{zlib.crc32(call_id.encode()):08x}"


def merged(base, extra):
    """`base` with `extra` laid over it, map by map."""
    out = dict(base)
    for key, value in extra.items():
        out[key] = merged(out[key], value) if isinstance(value, dict) and isinstance(out.get(key), dict) else value
    return out


def serialised(body):
    return json.dumps(cleaned(body), ensure_ascii=False, separators=(",", ":")).encode()


# -- thinking that goes back (reasoningEcho)
#
# A template can render earlier thinking: then a model goes on from its own thoughts in a loop of
# tool calls, and the prompt that the server has in its cache, thinking included, is the beginning
# of the next one. It goes to nobody but the local model that made it.

EARLIER, LATEST = "mm-looks-for-this-earlier-thought", "mm-looks-for-this-latest-thought"


def thoughts_rendered(backend, tools):
    """What thinking of a history the template renders: "all", "latest" (after the last question),
    "none", or "" if not told.

    It is asked to render a history with two thoughts. Of the 67 templates in llama-server 11434, 20
    render both, 14 the one that follows the last question, the others none. tools: as they are
    offered, since some templates keep thinking in a tool loop only; without any, nothing follows
    the last question, so that is not known, and taken to be rendered.
    """
    if not backend.entry["render"]:
        return ""
    field = backend.entry["echo"]
    messages = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2", field: EARLIER},
        {"role": "user", "content": "3"},
    ]
    if tools:
        call = {"id": "call00000", "type": "function", "function": {"name": tools[0]["function"]["name"], "arguments": "{}"}}
        messages += [{"role": "assistant", "content": "", field: LATEST, "tool_calls": [call]},
                     {"role": "tool", "tool_call_id": "call00000", "content": "4"}]
    body = {"model": backend.model, "messages": messages, **({"tools": tools} if tools else {})}
    prompt = dig(fetch_page(backend, backend.entry["render"], body), "prompt", backend.model)
    if isinstance(prompt, str):
        return "all" if EARLIER in prompt else "latest" if LATEST in prompt or not tools else "none"
    path, keys = backend.entry["keeps"]
    return "all" if dig(fetch_page(backend, path), keys, backend.model) is True else ""


def refuses_thoughts(error):
    """Whether a refusal is about the thinking in a history; `Failed to parse input` is about what
    the model said.
    """
    if error.kind not in ("server", "not_found") or "Failed to parse input" in error.message:
        return False
    # nothing else is to be done about it
    if error.kind == "server" and error.again in ("", "stream"):
        return re.search(r"(?i)template|jinja|reasoning|thinking|thought", error.message) is not None
    # the field itself is named
    return re.search(r"reasoning_content|\breasoning\b", error.message) is not None


class Echo:
    """What a server gets back of its own with a history: thinking, the ids of its calls, and what
    it added that mm does not know (Gemini's signatures, OpenRouter's reasoning_details).

    A message's "origin" holds it: {"maker", "text" of the thinking and its "tokens", "extra" fields,
    "calls": {id: extra fields}}. It stays in memory, and goes to the model that made it alone.
    """

    def __init__(self, backend, on):
        self.backend, self.on = backend, on
        self.insists = backend.entry["insists"]  # field without which it takes no calls back, or ""
        self.ids = set()       # of the calls that it made
        self.served = {}       # model: what its server calls it
        self.rendered = {}     # (model, whether tools are offered): what thoughts_rendered() told
        self.refusing = set()  # models whose template refused thinking

    def label(self, reply, calls):
        """{"origin": …} for the message of a Reply that is complete, or {}. Notes what the server
        calls the model, and its calls.
        """
        model, text = self.backend.model, reply.thought.getvalue()
        self.served[model] = reply.model
        self.ids.update(call["id"] for call in calls)
        extras = {call["id"]: call.pop("extra") for call in calls}
        extras = {call_id: extra for call_id, extra in extras.items() if extra}
        if not text.strip() or not (self.on or calls):
            text = ""
        if not text and not extras and not reply.extra:
            return {}
        tokens = max(1, reply.produced_tokens()[0])
        return {"origin": {"maker": (model, reply.model), "text": text, "tokens": tokens,
                           "extra": reply.extra, "calls": extras}}

    def backs(self, history, tools):
        """{index in the history: {"fields", "calls", "ids", "tokens"}} of what goes back with the
        next request.
        """
        model, out = self.backend.model, {}
        maker, first = (model, self.served.get(model)), self.first_rendered(history, tools)
        for index, message in enumerate(history):
            calls, origin = message.get("tool_calls") or [], message.get("origin", {})
            is_own = origin.get("maker") == maker
            must = self.insists if calls else ""
            back = {**NOTHING_BACK, "tokens": 0}
            back["ids"] = {call["id"]: call["id"] if call["id"] in self.ids else
                           foreign_id(call["id"]) for call in calls}
            if is_own:
                back["fields"], back["calls"] = dict(origin["extra"]), origin["calls"]
            if is_own and origin["text"] and (must or index >= first):
                back["fields"][must or self.backend.entry["echo"]] = origin["text"]
                back["tokens"] = origin["tokens"]
            elif must:  # not known any more, or another's: an empty text would be refused
                back["fields"] = {**back["fields"], must: " "}
            if calls or back["fields"]:
                out[index] = back
        return out

    def first_rendered(self, history, tools):
        """The index of the first message whose thinking goes back as reasoningEcho wants it.

        The server is asked what its template renders, once there is something to send.
        """
        model, about = self.backend.model, (self.backend.model, bool(tools))
        has_thoughts = any(message.get("origin", {}).get("text") for message in history)
        may_go = self.on and self.backend.entry["local"] and model and model not in self.refusing
        if not has_thoughts or not may_go:
            return len(history)
        if about not in self.rendered:
            self.rendered[about] = thoughts_rendered(self.backend, tools)
        if self.rendered[about] == "none":
            return len(history)
        if self.rendered[about] == "latest":
            return max((index for index, message in enumerate(history)
                        if message["role"] == "user"), default=0)
        return 0  # all, or not told


# ==================================================================================================
# 7. Protocols
#
# A protocol is where a request is posted, what is in it, and how its stream is read. One type per
# wire protocol, none per vendor: what vendors differ in is data in section 3. Chat completions
# leave the prompt and (unless thinkTags) the thinking to the server; with raw completions both are
# mm's: it writes the prompt as the model's chat template would, and parts thinking from answer at
# the tags.
# ==================================================================================================

# -- thinking in tags

THINK, THINK_END = "<think>", "</think>"


class ThinkTags:
    """Parts text at <think> and </think>, for servers that leave that to their clients.

    opened: the template has opened the block in the prompt, so that the text begins within it.
    Else only a text that begins with <think> has thinking. The first </think> ends the block,
    as in the servers' own parsers; what follows it is answer, whatever tags it holds.
    Of the pieces "hm </thi" and "nk> ok", the first gives "hm ", and the second "ok".
    """

    MOST_SPACE = 100  # characters before the opening tag

    def __init__(self, opened):
        self.opened = opened
        self.state = "start"  # then "thinking"; "gap" is the white space behind the block; "answer"
        self.rest = ""        # what could still become a tag

    def feed(self, text):
        """Yields ("reasoning" or "answer", text) of what is settled; a part of a tag is kept."""
        text, self.rest = self.rest + text, ""
        if self.state == "start":
            text = self.begin(text)
        if self.state == "thinking":
            thought, tag, text = text.partition(THINK_END)
            if tag:
                self.state = "gap"
            else:
                thought, self.rest = self.without_part_of_tag(thought)
            if thought:
                yield "reasoning", thought
        if self.state == "gap":
            text = text.lstrip()
            if text:
                self.state = "answer"
        if self.state == "answer" and text:
            yield "answer", text

    def begin(self, text):
        """The text behind the tag that it begins with; "" until that can be seen."""
        start = text.lstrip()
        may_be_tag = THINK.startswith(start) or THINK_END.startswith(start)
        if may_be_tag and start not in (THINK, THINK_END) and len(text) < self.MOST_SPACE:
            self.rest = text
            return ""
        if start.startswith(THINK):
            self.state = "thinking"
            return start[len(THINK):]
        if self.opened:
            self.state = "thinking"
            return text
        if start.startswith(THINK_END):  # left behind by a server that parts the thinking itself
            self.state = "gap"
            return start[len(THINK_END):]
        self.state = "answer"
        return text

    @staticmethod
    def without_part_of_tag(text):
        """-> (text, its end if that could begin a closing tag)."""
        for size in range(len(THINK_END) - 1, 0, -1):
            if text.endswith(THINK_END[:size]):
                return text[:-size], text[-size:]
        return text, ""

    def end(self):
        """Yields what is left. Whatever comes later is answer."""
        is_thinking = self.state == "thinking" or (self.state == "start" and self.opened)
        if self.rest:
            yield ("reasoning" if is_thinking else "answer"), self.rest
        self.state, self.rest = "answer", ""


def split_thinking(incoming, tags):
    """Deltas with their answer parted by ThinkTags. Raises what `incoming` raises."""
    try:
        for kind, value in incoming:
            if kind == "answer":
                yield from tags.feed(value)
                continue
            if kind == "reasoning":  # the server parts it itself
                tags.opened = False
            elif kind in ("call", "finish"):
                yield from tags.end()
            yield kind, value
    except MMError:
        yield from tags.end()
        raise
    yield from tags.end()


def has_lone_end(answer):
    """Whether an answer holds a closing tag that begins a line, and no opening one before it."""
    match = re.search(r"(?m)^\s*</think>", answer)
    return match is not None and THINK not in answer[:match.start()]


# -- the protocols, and what they need of HTTP

def retry_after(headers):
    """Seconds to wait, as an answer's headers tell, or None.

    Retry-After is in seconds or a date (RFC 9110, 10.2.3), and some write fractions; OpenAI and
    Azure send retry-after-ms beside it.
    """
    exact, value = headers.get("retry-after-ms", ""), headers.get("Retry-After", "")
    try:
        if re.fullmatch(r"[\d.]{1,12}", exact.strip()):
            return float(exact) / 1000
        if re.fullmatch(r"[\d.]{1,12}", value.strip()):
            return float(value)
        from email.utils import parsedate_to_datetime
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None


class Protocol:
    """How a request is posted and its stream read. A protocol adds these:

    path                where, below the base URL
    applies_template    whether the server makes the prompt, so that it takes tools and can be told to think
    fields(history, system, tools, think, backs)    a request's body, before any options
    tags(think)         the ThinkTags of an answer, or None where the server parts the thinking itself
    """

    def __init__(self, backend):
        self.backend = backend

    def body(self, history, system, tools, sampling, think, refused, backs=None):
        """The request body as a dict.

        tools: as Toolbox.schemas() gives them; think: True, False or None (as the server likes);
        sampling: fields that go out as they are; refused: optional fields that are left out;
        backs: see to_messages().
        """
        body = {
            key: value
            for key, value in self.fields(history, system, tools, think, backs).items()
            if key not in refused
        }
        body = merged(body, sampling)
        if body["stream"] is not True:  # -o stream=false
            body.pop("stream_options", None)  # vLLM refuses it then
        return body

    def stream(self, body, connection, tap, notice):
        """Posts bytes; -> an iterator of deltas. Raises MMError.

        tap: an open file or None; notice: told what went wrong there.
        """
        url, answered = self.backend.endpoint(self.path), False
        session, proxy = open_session(connection, url)
        from http.client import HTTPException
        from urllib3.exceptions import HTTPError  # not before open_session() has found requests
        headers = {**self.backend.headers(), "Content-Type": "application/json", "Accept": "text/event-stream"}
        try:
            with session, session.post(url, data=body, headers=headers, stream=True, allow_redirects=False,
                                       # silence is the watchdog's
                                       timeout=(CONNECT_SECONDS, None)) as response:
                if response.status_code >= 300:
                    raise self.refusal(response, url, proxy, connection)
                answered = True
                response.raw = Tap(response.raw, tap, notice)
                yield from deltas(response.iter_lines(), self.backend, show_url(url))
        except (MMError, OSError, HTTPException, HTTPError, ValueError) as error:
            if not isinstance(error, MMError):
                error = explain_exception(error, self.backend, proxy, answered)
            error.message = self.backend.redact(error.message)
            raise error from None
        finally:
            connection.hang_up()

    def end_thinking(self, its_id):
        """Tells llama.cpp to end the thinking of the stream `its_id`; -> whether it will.

        Called in the main thread, while the stream is read in its own.
        """
        order = {"id": its_id, "action": "reasoning_end"}
        answer = fetch_page(self.backend, "chat/completions/control", order)
        return isinstance(answer, dict) and answer.get("success") is True

    def refusal(self, response, url, proxy, connection):
        """MMError for an answer that is none: a redirect, or a status of 400 and more.

        requests would follow a redirect with a GET, and to any host, with the key.
        """
        if response.status_code < 400:
            from urllib.parse import urljoin
            what = f"gave HTTP {response.status_code}"
            try:
                target = show_url(urljoin(url, response.headers["Location"]))
                what = f"has moved to {target}: use that as the URL"
            except (KeyError, ValueError):
                pass  # it does not say where to
            return MMError("not_found", f"{show_url(url)} {what}")
        timer = threading.Timer(PROBE_SECONDS, connection.hang_up)
        timer.start()  # an error whose text never ends is still an error
        body = beginning(response, MAX_WORDS)
        timer.cancel()
        wait = retry_after(response.headers)
        error = explain(response.status_code, body, self.backend, show_url(url), wait)
        if proxy and response.status_code in (407, 502, 503, 504):
            advice = f"it was asked through the proxy {show_url(proxy)}"
            error.message = compose(error.message, "", advice)
        return error


class ChatCompletions(Protocol):
    """POST /chat/completions: messages, which the server makes a prompt of. Thinking comes in a
    field of its own.
    """

    path, applies_template = "chat/completions", True

    def fields(self, history, system, tools, think, backs):
        entry = self.backend.entry
        body = {"model": self.backend.model, **({"tools": tools} if tools else {}),
                "messages": to_messages(history, system, backs), "stream": True, **entry["fields"]}
        return body if think is None else merged(body, entry["thinking"].get("on" if think else "off", {}))

    def tags(self, think):
        setting = self.backend.entry["thinkTags"]
        if not setting:
            return None
        return ThinkTags(think is True or (setting == "open" and think is None))


# -- raw prompts

# Format: for each role what stands before and after its text; how the model's turn begins, and the
# token that ends it. A template in Jinja is of that format if it has the text `known_by`, and not
# `but_not` (of Phi-4, Llama 4, Gemma 4 and Llama 2).
TEMPLATES = {
    "chatml": {"system": ("<|im_start|>system\n", "<|im_end|>\n"), "user": ("<|im_start|>user\n", "<|im_end|>\n"),
               "assistant": ("<|im_start|>assistant\n", "<|im_end|>\n"), "turn": "<|im_start|>assistant\n", "stop": "<|im_end|>",
               "known_by": "<|im_start|>", "but_not": "<|im_sep|>"},
    "llama3": {"system": ("<|start_header_id|>system<|end_header_id|>\n\n", "<|eot_id|>"),
               "user": ("<|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|>"),
               "assistant": ("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"),
               "turn": "<|start_header_id|>assistant<|end_header_id|>\n\n", "stop": "<|eot_id|>",
               "known_by": "<|start_header_id|>", "but_not": "<|header_start|>"},
    # these two have no system role: its text stands before the first question
    "gemma": {"user": ("<start_of_turn>user\n", "<end_of_turn>\n"), "assistant": ("<start_of_turn>model\n", "<end_of_turn>\n"),
              "turn": "<start_of_turn>model\n", "stop": "<end_of_turn>", "known_by": "<start_of_turn>", "but_not": "<|turn>"},
    "mistral": {"user": ("[INST]", "[/INST]"), "assistant": ("", "</s>"), "turn": "", "stop": "</s>",
                "known_by": "[INST]", "but_not": "<<SYS>>"},
}


# as Qwen's template writes them
THINK_OPENED, THINK_CLOSED = f"{THINK}\n", f"{THINK}\n\n{THINK_END}\n\n"


def without_tools(messages):
    """Messages for a template that knows no tools: a call and its result become text; -> [(role,
    text)], roles alternating.
    """
    turns = []
    for message in messages:
        role, text = message["role"], message["content"]
        for call in message.get("tool_calls") or []:
            text = f"{text}\n[called {call['function']['name']} {call['function']['arguments']}]".lstrip()
        if role == "tool":
            role, text = "user", f"[its result]\n{text}"
        if turns and turns[-1][0] == role:
            text = f"{turns.pop()[1]}\n\n{text}"
        turns.append((role, text))
    return turns


def as_prompt(messages, template):
    """The prompt that a format of TEMPLATES makes of messages, without the token that begins a
    text: the server puts that.
    """
    turns, prompt = without_tools(messages), ""
    # no system role: its text goes before the first question
    if turns and turns[0][0] not in template:
        (_, system), question = turns[0], turns[1][1] if len(turns) > 1 else ""
        turns[:2] = [("user", f"{system}\n\n{question}" if question else system)]
    for role, text in turns:
        before, after = template[role]
        prompt += before + text + after
    return prompt + template["turn"]


class RawCompletions(Protocol):
    """POST /completions: a prompt that mm makes, for servers that apply no template. Thinking comes
    as text in <think> tags.

    A block that the prompt opens is thinking up to its closing tag; one that it opens and closes
    again leaves nothing but answer.
    """

    path, applies_template = "completions", False

    def opens(self, think):
        """Whether the prompt opens the thinking block (True), opens and closes it (False), or
        neither (None).
        """
        return True if think is None and self.backend.entry["thinkTags"] else think

    def fields(self, history, system, tools, think, backs):
        entry = self.backend.entry
        template = TEMPLATES[entry["template"] or "chatml"]
        block = {True: THINK_OPENED, False: THINK_CLOSED, None: ""}[self.opens(think)]
        prompt = as_prompt(to_messages(history, system), template) + block
        optional = {**entry["fields"]}
        optional.pop("reasoning_control", None)  # the thinking block is not the server's
        return {"model": self.backend.model, "prompt": prompt, "stream": True, "stop": [template["stop"]],
                **entry["limit"], **optional}

    def tags(self, think):
        opens = self.opens(think)
        return None if opens is False else ThinkTags(opens is True)


PROTOCOLS = {"chat": ChatCompletions, "completions": RawCompletions}


# -- the template in a model file

# bytes of a number
GGUF_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
GGUF_TEXT, GGUF_ARRAY = 8, 9  # the other types


def gguf_header(file):
    """{key: value} at the head of a little-endian GGUF file: texts, lists of texts, and integers.

    Any other list is None. What follows the header is not read. Raises ValueError with what is
    wrong. https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
    """
    def read(size):
        raw = file.read(size) if size <= MOST_TEXT else b""
        if len(raw) < size:
            raise ValueError("the header is damaged, or cut off")
        return raw

    def number(size):
        return int.from_bytes(read(size), "little")

    def text():
        return read(number(8)).decode("utf-8", "replace")

    def value(kind):
        if kind == GGUF_TEXT:
            return text()
        if kind != GGUF_ARRAY:
            return number(GGUF_SIZES.get(kind, MOST_TEXT + 1))
        kind, count = number(4), number(8)
        if kind == GGUF_TEXT:
            return [text() for _ in range(count)]
        read(count * GGUF_SIZES.get(kind, MOST_TEXT + 1))
        return None

    if file.read(4) != b"GGUF":
        raise ValueError("this is no GGUF file")
    version = number(4)
    if version not in (2, 3):
        raise ValueError(f"this is GGUF version {version}: mm reads 2 and 3, little-endian")
    number(8)  # of tensors
    header = {}
    for _ in range(number(8)):
        key = text()
        header[key] = value(number(4))
    return header


def template_of(path):
    """-> (chat template of a GGUF file, its name in TEMPLATES or "", its end-of-turn token or "").

    Raises MMError("config") for a file that cannot be read, is none, or has no template.
    """
    try:
        if os.path.exists(path) and not os.path.isfile(path):  # opening a pipe would wait
            raise ValueError("this is no regular file")
        with open(path, "rb") as file:
            header = gguf_header(file)
    except (OSError, ValueError) as error:
        raise MMError("config", f"{path}: {getattr(error, 'strerror', None) or error}") from None
    template = header.get("tokenizer.chat_template")
    if not isinstance(template, str) or not template:
        split = " (the first file of a split model has it)" if as_int(header.get("split.no")) else ""
        raise MMError("config", f"{path}: this model has no chat template{split}")
    tokens = header.get("tokenizer.ggml.tokens") or []
    number = header.get("tokenizer.ggml.eot_token_id", header.get("tokenizer.ggml.eos_token_id"))
    end = tokens[number] if isinstance(number, int) and number < len(tokens) else ""
    for name, form in TEMPLATES.items():
        if form["known_by"] in template and form["but_not"] not in template:
            return template, name, end
    return template, "", end


# ==================================================================================================
# 8. Tools
#
# What a model may call: four tools of mm's own, rows of BUILT_IN, of which those for files are
# methods of Toolbox by the same names, and the commands of the config file. A tool gets arguments
# that are a JSON object and gives back text; whatever goes wrong is text for the model, never an
# exception. Reading below the working directory is free; everything else asks. Nothing here trusts
# a path before its symbolic links are followed, a file before it is known to be one, or a command
# to end or to be brief.
# ==================================================================================================

RESULT_BYTES = 16 << 10    # of a result that reach the model; the middle is cut out
OUTPUT_BYTES = 8 << 20     # of output until a command counts as endless


class ToolError(Exception):
    """What a tool could not do, as a line for the model."""


def text_schema(**properties):
    return {"type": "object", "properties": {name: {"type": "string", "description": what} for name, what in properties.items()}}


def required(schema, *names):
    return {**schema, "required": list(names)}


BUILT_IN = {  # name: (what the model is told, JSON schema of its parameters)
    "list_files": ("List the files of a directory.", text_schema(path="the directory; the working directory if left out")),
    "read_file": ("Read a text file.", required(text_schema(path="the file"), "path")),
    "write_file": ("Write a text file, replacing what it held.",
                   required(text_schema(path="the file", content="its whole new content"), "path", "content")),
    "run_command": ("Run a shell command line in the working directory; gives its output and exit status. It gets no input.",
                    required(text_schema(command="the command line"), "command")),
}


class Toolbox:
    """The tools offered to a model, and what they may do.

    names: those that are on; commands: the config's own; seconds: time limit of a command, 0 for
    none; hidden: names of environment variables that hold keys; permit: called with the tool's name
    once a person has seen the call (shown()), gives "y", "n" or "a" (always, for this tool); None
    where nobody can be asked, so that it is refused.
    """

    def __init__(self, names=(), commands=None, seconds=120.0, hidden=(), permit=None):
        self.commands, self.seconds, self.hidden, self.permit = commands or {}, seconds, set(hidden), permit
        self.names, self.always = list(names), set()
        self.stopped, self.busy = False, False  # asked to stop; running a command
        try:
            self.directory = os.path.realpath(os.getcwd())
        except OSError:  # it was deleted: nothing is inside
            self.directory = os.devnull

    def known(self):
        """name: (what the model is told, schema) of every tool there is, sorted."""
        own = {
            name: (command["description"], command["parameters"])
            for name, command in self.commands.items()
        }
        return dict(sorted({**BUILT_IN, **own}.items()))

    def schemas(self):
        """The `tools` of a request: sorted by name whatever the order in the config, so that a
        server's prompt cache holds.
        """
        return [
            {
                "type": "function",
                "function": {"name": name, "description": what, "parameters": schema},
            }
            for name, (what, schema) in self.known().items()
            if name in self.names
        ]

    def run(self, call):
        """Runs a finished call (see Calls.finished), asking where it must; yields seconds while it
        runs; -> (ok, output).
        """
        name, arguments = call["name"], call["arguments"]
        try:
            if arguments is None:
                raw = one_line(call["raw"], 200)
                raise ToolError(
                    f"The arguments were not a complete JSON object, so nothing was run: {raw}"
                )
            if name not in self.names:
                offered = ", ".join(sorted(self.names)) or "none"
                raise ToolError(
                    f"There is no tool called {one_line(name, 80)!r}. Tools: {offered}."
                )
            self.check(name, arguments)
            self.ask(name, arguments)
            if name == "run_command":
                output = yield from self.command(["/bin/sh", "-c", arguments["command"]])
            elif name in self.commands:
                output = yield from self.command(arguments_of(self.commands[name], arguments))
            else:
                known = [
                    key for key in BUILT_IN[name][1]["properties"] if arguments.get(key) is not None
                ]
                output = getattr(self, name)(**{key: arguments[key] for key in known})
            return True, shortened(output)
        except ToolError as error:
            return False, shortened(str(error))
        except (OSError, ValueError) as error:  # ValueError: a path with a NUL
            where = f": {error.filename}" if isinstance(getattr(error, "filename", None), str) else ""
            return False, shortened(f"{name}: {getattr(error, 'strerror', None) or error}{where}")
        except Exception as error:  # a fault of mm's own ends the call, not the conversation
            return False, f"{name} failed: {type(error).__name__}: {one_line(error, 200)}"

    def check(self, name, arguments):
        schema = self.known()[name][1]
        missing = [key for key in schema.get("required", []) if arguments.get(key) is None]
        if missing:
            raise ToolError(f"{name} needs: {', '.join(missing)}.")
        for key, schema_of in schema["properties"].items():
            allowed = schema_of.get("enum")
            if isinstance(allowed, list) and arguments.get(key) is not None and arguments[key] not in allowed:
                raise ToolError(
                    f"{name}: {key} must be one of {json.dumps(allowed, ensure_ascii=False)}."
                )
        if name in BUILT_IN:
            odd = [
                key
                for key in schema["properties"]
                if not isinstance(arguments.get(key), (str, type(None)))
            ]
            if odd:
                raise ToolError(f"{name}: {', '.join(odd)} must be text.")

    def ask(self, name, arguments):
        """Raises ToolError unless the call is free or permitted."""
        if name in self.always or self.is_free(name, arguments):
            return
        answer = self.permit(name) if self.permit else None
        if answer is None:
            raise ToolError(
                f"{name} was not run: it needs permission, and nobody can be asked here "
                "(mm -y runs tools without asking)."
            )
        if answer == "a":
            self.always.add(name)
        elif answer != "y":
            raise ToolError(f"{name} was not run: the user refused it.")

    def is_free(self, name, arguments):
        return name in ("list_files", "read_file") and self.is_inside(self.real_path(arguments.get("path") or ""))

    def real_path(self, path):
        return os.path.realpath(os.path.join(self.directory, os.path.expanduser(path or ".")))

    def is_inside(self, path):
        return os.path.commonpath([self.directory, path]) == self.directory

    def preview(self, name, arguments):
        """-> (what a call will do, in one line; the lines that it would change) for a person."""
        if name == "run_command":
            return f"run {arguments.get('command', '')}", []
        if name in self.commands:
            import shlex
            return "run " + shlex.join(arguments_of(self.commands[name], arguments)), []
        path = self.real_path(arguments.get("path") or "")
        shown = os.path.relpath(path, self.directory) if self.is_inside(path) else path
        if name == "write_file":
            return f"write {shown}", self.difference(path, arguments["content"])
        return f"{'list' if name == 'list_files' else 'read'} {shown}", []

    def shown(self, call):
        """preview() of any finished call, or of one that cannot be run."""
        try:
            self.check(call["name"], call["arguments"])
            return self.preview(call["name"], call["arguments"])
        except (ToolError, KeyError, ValueError, OSError, AttributeError, TypeError):
            return f"{call['name']} {json.dumps(call['arguments'], ensure_ascii=False)}", []

    def difference(self, path, content):
        import difflib
        old = ""
        if os.path.isfile(path):  # opening a pipe would wait for its other end
            try:
                with open(path, encoding="utf-8", errors="replace", newline="") as file:
                    old = file.read(OUTPUT_BYTES)
            except OSError:
                pass  # it will not be written either
        if old == content:
            return ["(no change)"]
        old, new = old.split("\n"), content.split("\n")
        if len(old) * len(new) > 400_000:  # the time of a comparison grows with that
            return [f"-{len(old):,} lines", f"+{len(new):,} lines"]
        return list(difflib.unified_diff(old, new, "before", "after", lineterm="", n=2))[2:]

    def list_files(self, path=""):
        entries = sorted(os.scandir(self.real_path(path)), key=lambda entry: entry.name)
        return "\n".join(entry.name + ("/" if entry.is_dir() else "") for entry in entries) or "(empty)"

    def read_file(self, path):
        import stat
        real = self.real_path(path)
        mode = os.stat(real).st_mode
        if not stat.S_ISREG(mode):
            raise ToolError(
                f"{path} is {'a directory' if stat.S_ISDIR(mode) else 'no regular file'}."
            )
        with open(real, "rb") as file:
            raw = file.read(OUTPUT_BYTES)
            more = os.fstat(file.fileno()).st_size - len(raw)
        if b"\0" in raw:
            raise ToolError(f"{path} is not text: {len(raw) + max(more, 0):,} bytes.")
        return raw.decode("utf-8", "replace") + (f"\n[… {more:,} bytes more …]" if more > 0 else "")

    def write_file(self, path, content):
        """Writes beside the file and renames, so that a full disk leaves the old content."""
        import stat
        import tempfile
        real = self.real_path(path)
        if os.path.exists(real) and not stat.S_ISREG(os.stat(real).st_mode):
            raise ToolError(f"{path} is no regular file.")
        os.makedirs(os.path.dirname(real), exist_ok=True)
        old = os.stat(real) if os.path.exists(real) else None
        if old and not os.access(real, os.W_OK):
            raise ToolError(f"{path} may not be written.")
        mask = os.umask(0)  # it can be read only by setting it
        os.umask(mask)
        handle, beside = tempfile.mkstemp(dir=os.path.dirname(real), prefix=".mm-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(clean(content).encode())
            os.chmod(beside, old.st_mode & 0o777 if old else 0o666 & ~mask)
            if old and old.st_uid != os.getuid():
                os.chown(beside, old.st_uid, old.st_gid)
            os.replace(beside, real)
        except BaseException:
            os.unlink(beside)
            raise
        return f"Wrote {len(clean(content).encode()):,} bytes to {path}."

    def command(self, argv):
        """Runs argv, yielding seconds; -> its output and exit status. Time, too much output, or
        stop ends its process group.
        """
        import select
        import subprocess
        environment = {key: value for key, value in os.environ.items()
                       if key not in self.hidden and not key.endswith("_API_KEY")}
        self.busy = True  # before all else, as Ctrl-C can come at once
        output, started, reason, process = b"", time.monotonic(), "", None
        try:
            process = subprocess.Popen(
                argv,
                cwd=self.directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            while not reason and process.poll() is None:
                if select.select([process.stdout], [], [], 0.05)[0]:
                    piece = os.read(process.stdout.fileno(), 1 << 16)
                    output += piece
                    if not piece:  # it closed its output, and may go on
                        time.sleep(0.01)
                else:
                    yield time.monotonic() - started
                if self.seconds and time.monotonic() - started > self.seconds:
                    reason = f"ended after its time limit of {self.seconds:g} s"
                elif len(output) > OUTPUT_BYTES:
                    reason = f"ended after {OUTPUT_BYTES >> 20} MiB of output"
                elif self.stopped:
                    reason = "ended by the user"
            while not reason and select.select([process.stdout], [], [], 0)[0] and len(output) <= OUTPUT_BYTES:
                # what it left; what it started in the background may go on
                piece = os.read(process.stdout.fileno(), 1 << 16)
                output += piece
                if not piece:
                    break
        finally:
            if process and process.poll() is None:
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except OSError:
                    pass  # gone just now, or another user's (sudo)
            if process:
                process.stdout.close()
                try:
                    process.wait(1)
                except subprocess.TimeoutExpired:
                    reason += ", and goes on: it belongs to another user"
            self.busy = False
        text = output.decode("utf-8", "replace").replace("\0", "\ufffd").rstrip("\n")
        if reason:
            raise ToolError(f"{text}\n[{reason}]".lstrip("\n"))
        return f"{text}\n[exit status {process.returncode}]".lstrip("\n")


def shortened(text):
    """A result of at most RESULT_BYTES, cut in the middle, and saying so."""
    raw = clean(text).encode()
    if len(raw) <= RESULT_BYTES:
        return raw.decode()
    half = RESULT_BYTES // 2
    first, last = (part.decode("utf-8", "ignore") for part in (raw[:half], raw[-half:]))
    return f"{first}\n[… {len(raw) - 2 * half:,} bytes left out …]\n{last}"


PLACE = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")


def arguments_of(command, arguments):
    """A config command's argv with its places filled; a place of its own whose parameter is left
    out goes away.
    """
    texts = {name: "" for name in command["parameters"]["properties"]}
    for name, value in arguments.items():
        if name in texts and value is not None:
            texts[name] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    left_out = {f"{{{name}}}" for name in texts if arguments.get(name) is None}
    return [PLACE.sub(lambda place: texts.get(place.group(1), place.group()), part)
            for part in command["command"] if part not in left_out]


def check_commands(commands, where):
    """The config's own tools, ready for a Toolbox. Raises MMError("config") with a line per fault.
    """
    ready, faults = {}, []
    for name, command in commands.items():
        fault = command_fault(name, command)
        if fault:
            faults.append(f"{where}.{name}: {fault}")
            continue
        parameters = {"type": "object", "properties": {}, **typed(command.get("parameters") or {})}
        ready[name] = {"description": str(command.get("description") or name),
                       "parameters": parameters, "command": command["command"]}
    if faults:
        raise MMError("config", "\n".join(faults))
    return ready


def is_object_schema(value):
    """Whether a value is the JSON schema of an object, or {} for one without properties."""
    if not isinstance(value, dict) or value.get("type", "object") != "object":
        return False
    # {path: {type: string}}: what stands below properties
    if "properties" not in value and set(value) not in (set(), {"type"}):
        return False
    properties = value.get("properties", {})
    return isinstance(properties, dict) and all(isinstance(schema, dict) for schema in properties.values())


def command_fault(name, command):
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
        return "a tool's name has letters, digits, _ and - only"
    if name in BUILT_IN:
        return "mm has a tool of that name"
    if not isinstance(command, dict):
        return "wants description, parameters and command"
    unknown = [key for key in command if key not in ("description", "parameters", "command")]
    if unknown:
        return f"unknown key {one_line(unknown[0], 40)}{did_you_mean(unknown[0], ('description', 'parameters', 'command'))}"
    argv, parameters = command.get("command"), command.get("parameters") or {}
    if not isinstance(argv, list) or not argv or not all(isinstance(part, str) for part in argv):
        return "command: wants a list of texts, such as [date, -u]"
    if PLACE.fullmatch(argv[0]):
        return "command: the program to run is not for the model to choose"
    if not is_object_schema(parameters):
        return "parameters: wants a JSON schema: {type: object, properties: {NAME: {type: string}}}"
    properties, needed = parameters.get("properties", {}), parameters.get("required", [])
    if not isinstance(needed, list) or not all(isinstance(key, str) and key in properties for key in needed):
        return "parameters.required: names a parameter that is not in properties"
    unknown = [key for part in argv for key in PLACE.findall(part) if key not in properties]
    return f"command: no parameter is called {unknown[0]}" if unknown else ""


# ==================================================================================================
# 9. The conversation
#
# A turn is: call the model, do what it asks, call again, until it answers. Everything a turn does
# is told as events, dicts that every view reads alike; some hold a little more than the lines of
# --json (EVENTS), which a view may use. Whatever breaks a turn, the history keeps the question, the
# results of tools and the answer so far, so that the next question goes on from there. Thinking is
# in none of it, but for the label that reasoningEcho needs, which stays in memory. Methods that
# tell something are generators of events; "->" names what they return besides.
# ==================================================================================================

EVENTS = {  # the lines of --json: type -> its fields, in this order
    "reasoning": ("text",), "answer": ("text",),
    "progress": ("processed", "total"),                     # prompt tokens beyond the cached ones
    "tool_call": ("id", "name", "arguments"),               # complete, about to be run or refused
    "tool_result": ("id", "name", "ok", "output"),
    "retry": ("reason",),
    # kind: only "empty", where it explains exit code 1
    "notice": ("message", "kind"),
    "error": ("kind", "message"),
    "done": ("finish_reason", "provider", "model", "session", "usage", "timings", "seconds"),
}


class Timeline:
    """Tokens over time: for each kind, {tenths of a second since the start: tokens}."""

    def __init__(self):
        self.started = time.monotonic()
        self.rows = {"prompt": {}, "reasoning": {}, "answer": {}, "call": {}}

    def add(self, kind, tokens, now, since=None):
        """Counts tokens at `now`, or spreads them evenly over the time from `since` to now."""
        last = int((now - self.started) * 10)
        first = last if since is None else int((since - self.started) * 10)
        row = self.rows[kind]
        for tenth in range(first, last + 1):
            row[tenth] = row.get(tenth, 0) + tokens / (last - first + 1)


def counted_tokens(usage, timings):
    """-> (prompt tokens, those of them that were cached, produced tokens, the thinking in them), 0
    where neither usage nor llama.cpp's timings tell.

    Cached tokens and thinking are a part of the others, as OpenAI counts them, or stand beside
    them (Anthropic's cache, xAI's thinking): total_tokens tells, and that no part is larger than
    its whole.
    """
    usage, timings = usage or {}, timings or {}

    def count(key, details=None):
        place = usage.get(details) if details else usage
        return as_int(place.get(key)) if isinstance(place, dict) else 0

    prompt, produced = count("prompt_tokens"), count("completion_tokens")
    thinking = count("reasoning_tokens", "completion_tokens_details")
    cached = count("cached_tokens", "prompt_tokens_details")
    cached = cached or count("prompt_cache_hit_tokens") or count("cache_read_input_tokens")
    beside = count("total_tokens") - prompt - produced  # what is in neither
    if cached > prompt or (cached and beside in (cached, cached + thinking)):
        prompt, beside = prompt + cached, beside - cached
    if thinking > produced or (thinking and beside == thinking):
        produced += thinking
    if not prompt:
        cached = as_int(timings.get("cache_n"))
        prompt = as_int(timings.get("prompt_n")) + cached
    return prompt, cached, produced or as_int(timings.get("predicted_n")), thinking


class Reply:
    """What one model call has brought so far, and when. keep: keep the thinking as well, to send it
    back.
    """

    def __init__(self, timeline=None, keep=False):
        self.timeline = timeline or Timeline()
        self.answer, self.thought = io.StringIO(), io.StringIO()
        self.keep, self.kept = keep, 0  # kept: characters
        self.calls = Calls()
        self.finish, self.usage, self.timings = None, None, None
        self.model, self.id = "", ""  # as the server calls them
        self.extra = {}  # fields that only this server knows
        self.media = ""  # "image" or "audio", where the answer has any
        self.tokens = {"reasoning": 0, "answer": 0, "call": 0}
        self.seconds = {"reasoning": 0.0, "answer": 0.0, "call": 0.0}
        self.started = self.last = time.monotonic()
        self.first_token = None
        # prompt tokens, and when they were told of
        self.prompt_read, self.prompt_told = 0, self.started

    def count(self, kind):
        """Counts a delta as a token, which it is on every server that mm knows, and the time since
        the last one to its kind.
        """
        now = time.monotonic()
        if self.first_token is None:
            self.first_token = now - self.started
        else:
            self.seconds[kind] += now - self.last
        self.tokens[kind] += 1
        self.last = now
        self.timeline.add(kind, 1, now)

    def count_prompt(self, processed):
        """Counts the prompt tokens read since the last report: llama.cpp tells it once in 2,048."""
        now, new = time.monotonic(), max(0, processed - self.prompt_read)
        self.timeline.add("prompt", new, now, self.prompt_told)
        self.prompt_read, self.prompt_told = max(processed, self.prompt_read), now

    def write(self, kind, text):
        """Keeps text of the answer, and of the thinking where it is to go back."""
        if kind == "answer":
            self.answer.write(text)
        elif self.keep:
            self.thought.write(text)
        else:
            return
        self.kept += len(text)
        if self.kept > MAX_LINE:
            raise MMError("protocol", f"the answer passed {MAX_LINE >> 20} Mi characters")

    def add_extra(self, fields):
        """Keeps fields that only this server knows; a list goes on where it stopped."""
        for key, value in fields.items():
            before = self.extra.get(key)
            is_more = isinstance(before, list) and isinstance(value, list)
            self.extra[key] = before + value if is_more else value

    def produced_tokens(self):
        """-> (tokens of thinking, tokens of answer and calls): the server's figures, else a delta
        is a token.
        """
        counted = sum(self.tokens.values())
        _, _, produced, thinking = counted_tokens(self.usage, self.timings)
        produced = produced or counted
        if counted and not thinking:
            thinking = produced * self.tokens["reasoning"] // counted
        return thinking, max(0, produced - thinking)

    def finished_calls(self):
        """The calls of the answer; none behind an end that is not known to be a good one."""
        return self.calls.finished() if (self.finish or "").lower() in ENDED else []


def read_reply(incoming, reply, tags=None):
    """Takes deltas into `reply` and yields them as events: reasoning, answer, progress, and mm's
    own `waiting`. tags: the ThinkTags that part its answer, or None.
    """
    if tags:
        incoming = split_thinking(incoming, tags)
    for kind, value in incoming:
        if kind in TOKENS:
            reply.count(kind)
        if kind in ("reasoning", "answer"):
            reply.write(kind, value)
            yield {"type": kind, "text": value}
        elif kind == "waiting":
            yield {"type": "waiting", "seconds": value}
        elif kind == "call":
            reply.calls.add(value)
        elif kind == "extra":
            reply.add_extra(value)
        elif kind == "progress":
            reply.count_prompt(value[0])
            yield {"type": "progress", "processed": value[0], "total": value[1]}
        elif kind != "finish":  # usage, timings, model, id, media
            setattr(reply, kind, value)
        elif not reply.finish or reply.finish == "stop":
            # some servers say stop after tool_calls; a bare [DONE] says nothing
            reply.finish = value or reply.finish or ""


def error_event(error):
    """The event of an MMError."""
    return {"type": "error", "kind": error.kind, "message": error.message}


def notice(message, **more):
    """The event that tells a person something. kind="empty": it explains exit code 1."""
    return {"type": "notice", "message": message, **more}


SUMMARY = ("Sum up the conversation below, so that it can be continued from your summary alone: what was asked, what was found and "
           "decided, names, numbers, paths and code that matter, and what is still open. Write the summary only.\n\n")
SUMMED_UP = "[What was said before, summed up]\n"


class Conversation:
    """Questions to one backend and what became of them. ask() yields the events of a turn.

    toolbox: what the model may call; record: called with each message when it is complete, and with
    {"history": [...]} when the history is replaced; session: the Session it records to, or None.
    restartable: whether a view can mark a restart; False where the answer goes to a pipe, from
    which it could not be taken back. end_thinking: whether Ctrl-C ends the thinking first, where
    the server can. tap: an open file for the bytes of every stream, summaries too, or None.
    """

    def __init__(self, backend, settings, toolbox=None, record=None, session=None, restartable=True,
                 end_thinking=False, tap=None):
        self.backend, self.settings, self.session = backend, settings, session
        self.toolbox, self.record = toolbox or Toolbox(), record or (lambda item: None)
        self.restartable, self.may_end_thinking, self.tap = restartable, end_thinking, tap
        self.protocol = PROTOCOLS[backend.entry["protocol"]](backend)
        self.system, self.think = settings["system"], settings["think"]
        # of {"role", "content", "tool_calls", "tool_call_id"} and mm's own "origin" (see Echo)
        self.history = []
        self.untaken = False  # whether the last message is a question that no server has taken yet
        # what mm itself parted stays here
        self.echo = Echo(backend, settings["reasoningEcho"] and not self.protocol.tags(None))
        self.refused = set()  # optional request fields that this server does not take
        self.notices = []     # what is to be said at the next occasion
        self.told_of_tags = False
        # the ModelCall that runs, or ran until a pause before the next attempt, in which Ctrl-C
        # counts too
        self.call = None
        # its thinking is to be ended ("wanted"), or the server was told so ("asked")
        self.ending = ""
        self.window, self.probes = settings["contextWindow"], 0
        # more than one question is to come, so that the window is worth asking for at once
        self.will_grow = False
        # so many messages of the history were so many tokens, as the server counted, thinking aside
        self.measured = (0, 0)
        self.thought_tokens = 0  # of the thinking that went back with the last request
        self.begin()

    def begin(self):
        """A new turn."""
        self.timeline = Timeline()
        self.started = time.monotonic()
        self.replies = []
        self.partial = ""  # the answer so far of the call that runs
        self.can_sum_up = self.settings["compactAt"] > 0  # until a summary of this turn fails
        self.stopped = self.toolbox.stopped = False

    def ask(self, question, keep=None):
        """One turn. Its last event is `done`; an `error` before it says what ended it early.

        keep: the history it goes on from, where that is not all of it (/retry).
        """
        self.begin()
        message = {"role": "user", "content": question}
        if keep is None:
            self.remember(message)
        else:
            self.replace_history([*keep, message])
        yield from self.guarded(self.steps())
        yield self.done()

    def guarded(self, work):
        """The events of `work`, and an `error` for what ends it; the answer so far stays, also
        where run_turn() closes the turn.
        """
        is_refused = False
        try:
            yield from work
        except MMError as error:
            is_refused = error.kind not in ("cancelled", "stalled", "interrupted")
            yield error_event(error)
        finally:
            if self.partial:
                self.remember({"role": "assistant", "content": self.partial})
                self.partial = ""
            if is_refused and self.session and self.untaken:
                self.session.withdraw()
            self.untaken = False
        yield from self.what_is_to_be_said()

    def remember(self, message):
        self.history.append(message)
        self.untaken = message["role"] == "user"
        self.record(without_thought(message))

    def replace_history(self, history):
        self.history[:] = history
        self.untaken = False
        self.measured = (0, 0)
        self.record({"history": [without_thought(message) for message in history]})

    def what_is_to_be_said(self):
        while self.notices:
            yield notice(self.notices.pop(0))

    def interrupt(self):
        """Ctrl-C; safe in a signal handler. Ends the thinking if it can, else the turn; -> False
        where it can do neither.
        """
        if self.can_end_thinking():
            self.ending = "wanted"
            self.call.wake()
            return True
        if self.stopped or not (self.call or self.toolbox.busy):
            return False
        if self.call:
            self.call.stop()
        self.stopped = self.toolbox.stopped = True
        return True

    def can_end_thinking(self):
        """Whether the model thinks right now and can be told to come to its answer, once."""
        if not self.may_end_thinking or not self.call or self.ending or not self.replies:
            return False
        fields = set(self.backend.entry["fields"]) - self.refused
        if "reasoning_control" not in fields or not self.protocol.applies_template:
            return False
        reply = self.replies[-1]
        is_shown = reply.timeline is self.timeline  # a summary's is not
        is_thinking = reply.tokens["reasoning"] and not reply.tokens["answer"]
        return bool(is_shown and is_thinking and reply.id)

    def steps(self):
        """Model calls and tool calls in turn, until the model answers."""
        step = 0
        while not self.settings["maxSteps"] or step < self.settings["maxSteps"]:
            step += 1
            yield from self.make_room()
            reply = yield from self.model_call()
            calls, answer, self.partial = reply.finished_calls(), reply.answer.getvalue(), ""
            message = {"role": "assistant", "content": answer, **self.echo.label(reply, calls)}
            if calls:
                message["tool_calls"] = calls
            if answer.strip() or calls:
                self.remember(message)
            self.measure(reply)
            if not calls:
                yield from verdict(reply)
                yield from self.what_of_the_model(reply.model)
                return
            for call in calls:
                yield from self.tool_call(call)
        raise MMError("steps", f"stopped after {step} model calls in one turn: "
                      "ask it to go on, or raise --max-steps (maxSteps)")

    def tool_call(self, call):
        """Runs or refuses one call. After a Ctrl-C, the rest have no result, and to_messages()
        tells the model so.
        """
        # else it is no call that could be shown, and its result says why
        if call["arguments"] is not None:
            yield {**tool_call_event(call), "preview": lambda: self.toolbox.shown(call)}
        work = self.toolbox.run(call)
        while True:
            try:
                yield {"type": "waiting", "seconds": next(work), "tool": True}
            except StopIteration as ended:
                ok, output = ended.value
                break
        self.remember({"role": "tool", "tool_call_id": call["id"], "content": output})
        yield {"type": "tool_result", "id": call["id"], "name": call["name"], "ok": ok,
               "output": output}
        if self.toolbox.stopped:
            raise MMError("cancelled", "stopped")

    def model_call(self, make_body=None):
        """One model call, asked again where that can help, with the same bytes unless something is
        left out of them; no tool runs again. -> its whole Reply.

        make_body: for a request that is not the conversation's own (a summary): makes its bytes.
        """
        tries, loading, started = 0, False, time.monotonic()
        think = False if make_body else self.think
        while True:
            may_go_back = self.echo.on or bool(self.toolbox.names)
            reply = Reply(None if make_body else self.timeline, may_go_back)
            self.replies.append(reply)
            try:
                body = make_body() if make_body else self.request()
                yield from self.read(reply, body, self.protocol.tags(think))
                return reply
            except MMError as error:
                if error.kind == "not_found":
                    hint = self.unlisted_model()
                    error.message += f" · {hint}" if hint else ""
                left_out = yield from self.leave_out(error, reply, make_body is not None)
                if left_out:
                    continue
                if not self.may_try_again(error, reply, tries, time.monotonic() - started):
                    raise
                if not (loading and error.again == "loading"):  # loading is said once
                    yield {"type": "retry", "reason": error.message}
                loading = error.again == "loading"
                tries += not loading
                yield from self.pause(0.0 if error.again == "stream" else error.wait)
            finally:
                # a second try that brings nothing does not take away what the first one brought
                if not make_body:
                    self.partial = reply.answer.getvalue() or self.partial
                self.call, self.ending = None, ""

    def leave_out(self, error, reply, for_summary):
        """Leaves out of the next request what the one that ended in `error` was refused for: an
        optional field, earlier thinking, or turns that do not fit. -> whether there was any.
        """
        if self.stopped or reply.first_token is not None:
            return False
        if error.again == "field" and error.field not in self.refused:
            self.refused.add(error.field)
            if error.field not in self.backend.entry["fields"]:  # it was asked for (--no-think)
                yield notice(f"the server refuses {error.field}: asked again without it")
            return True
        if for_summary:
            return False
        if error.again == "tools" and self.toolbox.names:
            self.toolbox.names = []
            yield notice(f"{error.message}: asked again without tools")
            return True
        refused = refuses_thoughts(error)
        if self.thought_tokens and (refused or error.kind == "overflow"):
            for message in self.history:
                message.get("origin", {})["text"] = ""
            why = "the context is full"
            if refused:
                self.echo.refusing.add(self.backend.model)
                why = "the server refuses thinking in the history, and gets none from now on"
            yield notice(f"{why}: asked again without the earlier thinking")
            return True
        missing = re.search(r"\b(reasoning_content|reasoning)\b.*HTTP 400", error.message)
        if missing and not self.echo.insists and any(m.get("tool_calls") for m in self.history):
            self.echo.insists = missing.group(1)
            return True
        if error.kind == "overflow" and self.can_sum_up:
            self.window = self.window or error.window
            return (yield from self.compact())
        return False

    def unlisted_model(self):
        """unknown_model() by the list of a server of one's own, which is asked for it; else ""."""
        if not takes_first_model(self.backend):
            return ""
        return unknown_model(self.backend, model_ids(*ask_models(self.backend)))

    def what_of_the_model(self, served):
        """A notice where a server has answered by another model than the one that was named."""
        if served and not same_model(served, self.backend.model):
            message = self.unlisted_model()
            if message:
                yield notice(f"{message}: {served} has answered")

    def may_try_again(self, error, reply, tries, elapsed):
        """Whether the call that ended in `error` is made once more (see MMError.again)."""
        if self.stopped or reply.finish is not None or error.again in ("", "field", "tools"):
            return False
        if error.again == "loading":
            limit = self.settings["firstTokenTimeout"]
            return not limit or elapsed < limit
        can_be_taken_back = self.restartable or not reply.answer.tell()
        return tries < self.settings["retries"] and can_be_taken_back

    def pause(self, seconds):
        started = time.monotonic()
        while time.monotonic() - started < seconds:
            if self.stopped:
                raise MMError("cancelled", "stopped")
            yield {"type": "waiting", "seconds": time.monotonic() - started}
            time.sleep(min(0.1, seconds))

    def request(self):
        """The bytes of the next request."""
        tools = self.toolbox.schemas()
        backs = self.echo.backs(self.history, tools)
        self.thought_tokens = sum(back["tokens"] for back in backs.values())
        # options (-o) are the strongest: section 14 has laid them over the provider's own
        sampling = merged(self.settings["sampling"], self.backend.entry["sampling"])
        return serialised(self.protocol.body(self.history, self.system, tools, sampling, self.think,
                                             self.refused, backs))

    def read(self, reply, body, tags):
        """One request and its stream, as events. body: its bytes; tags: see Protocol.tags()."""
        def open_stream(connection):
            return self.protocol.stream(body, connection, self.tap, self.notices.append)

        settings, is_set = self.settings, self.settings.source("watchdogTimeout")
        waits_for_call = self.toolbox.names and not self.backend.entry["streamsCalls"] and not is_set
        self.call = ModelCall(open_stream, settings["watchdogTimeout"],
                              settings["firstTokenTimeout"], waits_for_call)
        for event in read_reply(self.call, reply, tags):
            if self.untaken and event["type"] != "waiting":  # the server has taken it
                self.untaken = False
            yield event
            yield from self.what_is_to_be_said()
            if self.ending == "wanted":  # Ctrl-C
                self.ending = "asked"
                if not self.protocol.end_thinking(reply.id):
                    raise MMError("cancelled", "stopped")
        hint = truncation_hint(body, reply)
        if hint:
            yield notice(hint)
        if not self.told_of_tags and has_lone_end(reply.answer.getvalue()):
            self.told_of_tags = True
            yield notice("this answer has a closing </think> and no opening one: `thinkTags: open` "
                         "for this provider in the config parts the thinking from it")

    # -- the context window

    def measure(self, reply):
        """Notes how many tokens the history is, where the server says so; without thinking, as not
        all of it goes back.
        """
        tokens = counted_tokens(reply.usage, reply.timings)[0]
        if tokens:
            answered = reply.produced_tokens()[1]
            self.measured = len(self.history), max(0, tokens - self.thought_tokens) + answered

    def size(self):
        """Tokens that the next prompt has: what the server counted last, a fourth of the characters
        since, and the thinking that goes back.
        """
        count, tokens = self.measured
        tools = self.toolbox.schemas()
        if not count:
            tokens = tokens_in([self.system, tools])
        tokens += tokens_in([without_thought(message) for message in self.history[count:]])
        backs = self.echo.backs(self.history, tools)
        return tokens + sum(back["tokens"] for back in backs.values())

    def make_room(self):
        """Before a call: compacts once the next prompt passes compactAt of the window."""
        if self.can_sum_up and (len(self.history) > 1 or self.will_grow):
            room = self.settings["compactAt"] * self.find_window()
            if room and self.size() > room:
                yield from self.compact()

    def find_window(self):
        """The context that the server serves, in tokens; 0 where it does not say. Some say it only
        once the model is loaded.
        """
        if not self.window and self.probes < 3:
            self.probes += 1
            self.window = probe(self.backend)["window"]
        return self.window

    def compact(self, everything=False):
        """Replaces the turns before the last question (or all that is there) by a summary; ->
        whether there is more room now.

        Cut between turns, so never between a call and its result. Where only one turn is left, its
        older tool results go.
        """
        cut = len(self.history)
        while cut and not everything:
            cut -= 1
            if self.history[cut]["role"] == "user":
                break
        # nothing is left to sum up
        if cut == 0 or (cut == 1 and self.history[0]["content"].startswith(SUMMED_UP)):
            return (yield from self.drop_results())
        try:
            summary = yield from self.summary(self.history[:cut])
        except MMError as error:
            if error.kind == "cancelled":
                raise
            self.can_sum_up = False
            yield notice("the conversation could not be summed up, and stays as it is: "
                         + error.message)
            return False
        summary = {"role": "user", "content": SUMMED_UP + summary}
        self.replace_history([summary, *self.history[cut:]])
        yield notice(f"the {cut} messages before this were replaced by a summary")
        return True

    def drop_results(self):
        """Takes the tool results but the last two out of the only turn there is; -> whether there
        were any.
        """
        large = [index for index, message in enumerate(self.history)
                 if message["role"] == "tool" and len(message["content"]) > 400][:-2]
        history = list(self.history)
        for index in large:
            history[index] = {**history[index], "content": "[This result was taken out to make room.]"}
        if large:
            self.replace_history(history)
            yield notice(f"the context was full: {len(large)} older tool results were taken out")
        return bool(large)

    def summary(self, messages):
        """A summary of messages, asked for with thinking off. Raises MMError if there is none."""
        # three characters a token is cautious, and the summary itself needs room
        text = transcript(messages, int(self.window * 0.6) * 3)
        asked = [{"role": "user", "content": SUMMARY + text}]
        before, reply = len(self.replies), Reply()
        work = self.model_call(lambda: serialised(
            self.protocol.body(asked, "", [], {}, False, self.refused)))
        try:
            for event in work:
                reply = self.replies[-1]  # what model_call returns is lost in a for loop
                if reply.answer.tell() > max(len(text), 2000):
                    raise MMError("empty", "the summary was longer than what it sums up")
                if event["type"] == "waiting" and reply.first_token is not None:
                    event["summing_up"] = sum(reply.tokens.values())
                if event["type"] in ("waiting", "progress", "notice"):
                    yield event
        finally:
            work.close()
            del self.replies[before:]
        answer = reply.answer.getvalue()
        if self.backend.entry["thinkTags"]:  # the template may have opened the block all the same
            answer = answer.split(THINK_END, 1)[-1]
        answer = answer.strip()
        if not answer or reply.finish == "length":
            raise MMError("empty", f"the summary was {'cut' if answer else 'empty'}")
        return answer

    # -- what a person changes in between

    def clear(self):
        """Forgets what was said, and what was permitted; what was recorded stays in its own
        session.
        """
        self.history.clear()
        self.untaken = False
        self.measured = (0, 0)
        self.toolbox.always.clear()
        if self.session:
            self.session.renew()

    def use(self, model=None, system=None):
        """Another model, whose context is not known yet, or another system prompt, from the next
        question on.
        """
        if model is not None:
            self.backend.model, self.measured, self.probes = model, (0, 0), 0
            self.window = self.settings["contextWindow"]
        if system is not None:
            self.system = system
        if self.session:
            self.session.about.update(model=self.backend.model, system=self.system)
        if self.history:
            self.record({"model": self.backend.model, "system": self.system})

    def done(self):
        session = self.session.id if self.session else None
        return done_event(self.backend.name, self.backend.model, session, self.replies,
                          self.started, self.timeline)


def tool_call_event(call):
    """The event of a finished call (see Calls.finished)."""
    return {"type": "tool_call", **{key: call[key] for key in EVENTS["tool_call"]}}


def without_thought(message):
    """A message as it is recorded: what a model thought stays in memory."""
    return {key: value for key, value in message.items() if key != "origin"}


def tokens_in(value):
    """A cautious guess where the server counts nothing: four characters are a token."""
    return len(json.dumps(value, ensure_ascii=False)) // 4


def transcript(messages, room):
    """Messages as text. Where they take more than `room` characters, each is cut to its share.

    What a tool gave and took is cut to a quarter of that; an earlier summary keeps a quarter of the
    room. room: 0 for any.
    """
    whole = sum(len(json.dumps(message, ensure_ascii=False)) for message in messages)
    share = room // len(messages) if 0 < room < whole else whole
    parts = []
    for message in messages:
        content, limit = message["content"], share
        if message["role"] == "tool":
            limit = share // 4
        elif content.startswith(SUMMED_UP):
            limit = max(share, room // 4)
        parts.append(f"{message['role'].upper()}: {shorter(content, limit)}")
        for call in message.get("tool_calls") or []:
            arguments = json.dumps(call["arguments"] or {}, ensure_ascii=False)
            parts.append(f"CALL {call['name']} {shorter(arguments, share // 4)}")
    return "\n\n".join(parts)


def shorter(text, limit):
    return text if len(text) <= limit else f"{text[:limit // 2]} […] {text[-limit // 2:]}"


def done_event(provider, model, session, replies, started, timeline=None):
    """The `done` of a turn; beside its fields, for figures(): `tokens` (thinking, answer) of all
    its calls, and the Timeline.
    """
    last = replies[-1] if replies else Reply()
    first = [reply.first_token for reply in replies if reply.first_token is not None]
    thinking = answer = thinking_seconds = answer_seconds = 0
    for reply in replies:
        thinking_seconds += reply.seconds["reasoning"]
        answer_seconds += reply.seconds["answer"] + reply.seconds["call"]
        tokens = reply.produced_tokens()
        thinking, answer = thinking + tokens[0], answer + tokens[1]
    seconds = {"first_token": rounded(first[0] if first else None),
               "thinking": rounded(thinking_seconds), "answer": rounded(answer_seconds),
               "total": rounded(time.monotonic() - started)}
    return {"type": "done", "finish_reason": last.finish, "provider": provider, "model": model,
            "session": session, "usage": last.usage, "timings": last.timings, "seconds": seconds,
            "tokens": (thinking, answer), "timeline": timeline or Timeline()}


def rounded(seconds):
    return None if seconds is None else round(seconds, 3)


# finish_reasons: of an answer that is complete, cut, or held back
ENDED = ("", "stop", "tool_calls", "function_call", "eos", "end_turn", "stop_sequence",
         "complete", "tool_use", "tool_call")
CUT = ("length", "max_tokens", "MAX_TOKENS", "model_length", "model_context_window_exceeded")
FILTERED = ("content_filter", "sensitive", "safety", "SAFETY", "refusal")


def verdict(reply):
    """Events that explain an ended answer. An empty one at the token limit is a notice of kind
    `empty`, else an error.
    """
    tokens = reply.produced_tokens()[0]
    finish = reply.finish or ""
    if reply.answer.getvalue().strip():
        if finish in CUT:
            yield notice("the answer is cut: it reached max_tokens (-o max_tokens=N), "
                         f"or the context is full (finish_reason {finish})")
        elif finish in FILTERED:
            yield notice("the answer is cut: the server's content filter ended it "
                         f"(finish_reason {finish})")
        elif finish.lower() not in ENDED:
            yield notice(f"the server ended the answer with finish_reason {one_line(finish, 60)}")
    elif reply.media:
        yield notice(f"the answer is of another kind ({reply.media}), which mm does not show",
                     kind="empty")
    elif finish in FILTERED:
        raise MMError("empty", "the server's content filter let no answer through "
                      f"(finish_reason {finish})")
    elif finish in CUT:
        why = "no answer fits the token limit: raise max_tokens, or the context is full"
        if reply.calls.calls:
            why = "a tool call was cut at the token limit, so it was not run: raise max_tokens"
        elif tokens:
            why = (f"the whole budget went into thinking ({tokens:,} tokens): "
                   "raise max_tokens, or --no-think (/think off)")
        yield notice(why, kind="empty")
    elif tokens:
        raise MMError("empty", f"the model thought ({tokens:,} tokens) and gave no answer: "
                      "ask again, or --no-think (/think off)")
    else:
        raise MMError("empty", "the model gave no answer, and no reason")


def truncation_hint(body, reply):
    """What is said where the server counts far fewer tokens than were sent, or "": Ollama and
    others drop what does not fit and say nothing.

    Eight characters that are no white space and no \\u escape make at least one token, in any text
    people send.
    """
    counted = counted_tokens(reply.usage, None)[0]
    sent = len(body.decode().translate({32: None, 10: None}).replace("\\n", ""))
    if not counted or sent <= 8000 or counted >= sent / 8:
        return ""
    return (f"the server read {counted:,} prompt tokens where about {sent // 4:,} were sent: "
            "it cuts what does not fit its context")


# ==================================================================================================
# 10. Sessions
#
# A conversation on disk: a file of JSON lines that only grows, one line a message, written when the
# message is complete, so that kill -9 loses at most the answer in flight. What a crash leaves (a
# torn last line, a run of NULs) is skipped and named, and never glued to: a line begins on a line
# of its own. Each line is one write to a file opened for appending, so two processes on one session
# lose nothing. Where nothing can be written, that is said once and the conversation goes on.
# ==================================================================================================

def sessions_folder():
    return os.path.join(xdg_home("XDG_STATE_HOME", ".local/state"), "sessions")


def session_id(path):
    return os.path.basename(path)[:-len(".jsonl")]


class Session:
    """Where a conversation is recorded. about: its first line: provider, model, url, system;
    notice: told what went wrong.
    """

    def __init__(self, about, notice, path=""):
        self.about, self.notice, self.path = about, notice, path
        self.file, self.broken, self.size = None, False, 0
        self.taken = 0  # bytes that stay whatever becomes of the question
        if not path:
            self.renew()

    def renew(self):
        """Begins another session; its file is made with its first message."""
        name = time.strftime("%Y%m%d-%H%M%S-") + os.urandom(2).hex()
        self.path = os.path.join(sessions_folder(), name + ".jsonl")
        self.close()

    @property
    def id(self):
        return session_id(self.path)

    def record(self, item):
        """Appends a message, or any other item of JSON, as one line."""
        if self.broken:
            return
        try:
            if "history" in item and self.file is not None and os.fstat(self.file).st_size != self.size:
                # another process has said something here, which a new history must not replace
                self.renew()
            if self.file is None:
                self.open()
            if item.get("role") == "user":
                self.taken = os.fstat(self.file).st_size
            self.append(item)
            self.size = os.fstat(self.file).st_size
        except OSError as error:
            self.broken = True
            self.notice(f"the conversation is not saved: {self.path}: {error.strerror}")

    def withdraw(self):
        """Takes out the last question, which a server refused, unless another process has written
        behind it; a session that would be empty goes.
        """
        try:
            if self.file is None or os.fstat(self.file).st_size != self.size:
                return
            os.ftruncate(self.file, self.taken)
            self.size = self.taken
            if os.pread(self.file, self.taken, 0).count(b"\n") == 1:
                os.unlink(self.path)
                self.close()
        except OSError:
            pass  # then it stays

    def open(self):
        os.makedirs(os.path.dirname(self.path), mode=0o700, exist_ok=True)
        self.file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        size = os.fstat(self.file).st_size
        if not size:
            self.append({"session": 1, **self.about})  # 1: the version of this format
        elif os.pread(self.file, 1, size - 1) != b"\n":
            os.write(self.file, b"\n")

    def append(self, item):
        line = serialised(item) + b"\n"
        written = os.write(self.file, line)
        if written < len(line):  # a disk that is full now: what is torn ends here
            os.write(self.file, b"\n")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self):
        if self.file is not None:
            os.close(self.file)
        self.file = None


MOST_SESSION = 256 << 20  # bytes


def load_session(path):
    """-> (about, history, [what a person should hear of damage]). Raises MMError("config") if it
    cannot be read at all.
    """
    try:
        with open(path, "rb") as file:
            raw = file.read(MOST_SESSION + 1)
    except OSError as error:
        raise MMError("config", f"session {path}: {error.strerror}") from None
    if len(raw) > MOST_SESSION:
        raise MMError("config", f"session {path}: larger than {MOST_SESSION >> 20} MiB")
    name, about, history, notes = session_id(path), {}, [], []
    rows = raw.split(b"\n")  # at LF only: U+2028 is text
    for number, row in enumerate(rows, 1):
        if not row.strip():
            continue
        try:
            item = json.loads(row.decode("utf-8-sig"))
            if "role" in item:
                history.append(stored_message(item))
            elif "history" in item:
                history = [stored_message(message) for message in item["history"]]
            elif "session" in item or "model" in item:  # the first line, or a change of it
                about.update(
                    {
                        key: item[key]
                        for key in ("provider", "model", "url", "system")
                        if isinstance(item.get(key), str)
                    }
                )
            else:
                raise ValueError
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            torn = number == len(rows)
            notes.append(
                f"session {name}: line {number} is {'cut off' if torn else 'damaged'}, and was skipped"
            )
    if len(notes) > 4:
        notes[3:] = [f"session {name}: {len(notes) - 3:,} more lines are damaged"]
    if not raw.strip():
        notes.append(f"session {name} is empty")
    elif history and (history[-1]["role"] != "assistant" or history[-1].get("tool_calls")) \
            and not history[-1]["content"].startswith(SUMMED_UP):
        notes.append(f"session {name}: the last question has no answer")
    return about, history, notes


def stored_message(item):
    """A message of a session file, mended where a tool call is broken. Raises ValueError or
    TypeError if it is none.
    """
    role, content = item["role"], item.get("content") or ""
    if role not in ("user", "assistant", "tool") or not isinstance(content, str):
        raise ValueError
    message = {"role": role, "content": content}
    if role == "tool":
        message["tool_call_id"] = str(item["tool_call_id"])
    if role == "assistant" and item.get("tool_calls"):
        if not all(isinstance(call[key], str) and call[key] for call in item["tool_calls"] for key in ("id", "name")):
            raise ValueError
        message["tool_calls"] = [
            {
                "id": call["id"],
                "name": call["name"],
                "raw": "",
                "arguments": call["arguments"] if isinstance(call.get("arguments"), dict) else {},
            }
            for call in item["tool_calls"]
        ]
    return message


def list_sessions():
    """[(id, path, modification time)], newest first."""
    found = []
    try:
        entries = list(os.scandir(sessions_folder()))
    except FileNotFoundError:
        entries = []
    except OSError as error:
        raise MMError("config", f"{sessions_folder()}: {error.strerror}") from None
    for entry in entries:
        try:
            if entry.name.endswith(".jsonl") and entry.is_file():
                found.append((session_id(entry.path), entry.path, entry.stat().st_mtime))
        except OSError:
            continue  # gone by now
    return sorted(found, key=lambda session: session[2], reverse=True)


def find_session(its_id):
    """The path of the session whose id begins so; of the newest one for "". Raises
    MMError("config").
    """
    sessions = {name: path for name, path, _ in list_sessions()}
    matching = [name for name in sessions if name.startswith(its_id)]
    if not sessions:
        raise MMError("config", f"there is no session yet (in {sessions_folder()})")
    if not matching:
        raise MMError("config", f"no session begins with {one_line(its_id, 40)} (mm --sessions)")
    if its_id and its_id not in matching and len(matching) > 1:
        raise MMError(
            "config",
            f"more than one session begins with {one_line(its_id, 40)}: {', '.join(matching[:4])}",
        )
    return sessions[its_id if its_id in matching else matching[0]]


def session_lines(most=50):
    """--sessions: a line each: id, when, how many messages, the first question."""
    out = []
    for name, path, modified in list_sessions()[:most]:
        try:
            _, history, _ = load_session(path)
        except MMError as error:
            out.append(error.message)
            continue
        first = next(
            (message["content"] for message in history if message["role"] == "user"), "(empty)"
        )
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(modified))
        out.append(f"{name}  {when}  {len(history):>4}  {one_line(first, 60)}")
    return out or ["no session is saved yet"]


def as_markdown(history, system):
    """A conversation as a text to keep (/save FILE)."""
    parts = [f"**system**\n\n{system}"] if system.strip() else []
    for message in history:
        calls = "".join(f"\n\n`{call['name']} {json.dumps(call['arguments'], ensure_ascii=False)}`"
                        for call in message.get("tool_calls") or [])
        content = f"```\n{message['content']}\n```" if message["role"] == "tool" else message["content"]
        parts.append(f"**{message['role']}**\n\n{content}{calls}".rstrip())
    return "\n\n".join(parts) + "\n"


# ==================================================================================================
# 11. Display
#
# Two views of the same events. All that other sections use of a view is this:
#
#   show(event)         shows one of the EVENTS, or mm's own "waiting", after which all is flushed
#   note(text)          shows what a command of the REPL says
#   permit(name)        asks a person whether a tool may run; only a Person can
#   flush(), close()    write what is pending; end what stands on the screen
#   out, side, pens     the Pen of the answer, that of all else (a Person's), and both
#   hide, quiet, stats  options: no thinking; no notices and status line; figures after a turn
#
# On a terminal, text of a model, a tool or a server is data: nothing in it is obeyed, and as single
# characters are replaced, a sequence split over two deltas is not obeyed either. Pipes get the text
# as it is. Styles are switched off again with every piece, so that whatever ends mm leaves the
# terminal as it was.
# ==================================================================================================

# what a terminal is shown for a character that it would obey: ␛ for ESC
VISIBLE = {code: chr(0x2400 + code) for code in range(32)}
VISIBLE.update(dict.fromkeys(range(0x80, 0xA0), "\ufffd"))
VISIBLE.update({9: "\t", 10: "\n", 13: None, 127: "␡"})
# characters that hide text or turn it round
INVISIBLE = re.compile("[\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")
THINKING, NOTICE, ERROR = "2;3", "2", "31"  # SGR codes: dim italic, dim, red
CHANGES = {"+": "32", "-": "31"}  # of a row in a change, by how it begins: green, red
WIPE = "\r\x1b[K"  # clears a terminal's line
# what blocks begin with; the characters of a bar, for no token in a span up to the most. The second
# table is for terminals that cannot show UTF-8
MARKS = {"thinking": "💭 ", "answer": "🤖 ", "tool": "🔧 ", "bar": " ▁▂▃▄▅▆▇█"}
PLAIN_MARKS = {"thinking": "thinking: ", "answer": "answer: ", "tool": "tool: ", "bar": " _.-=+*%#"}


class Pen:
    """An output stream: what it can show, and whether text stands in its line already.

    aside: what cannot be written is dropped; else flush() raises OSError.
    """

    def __init__(self, stream, aside=False):
        self.stream, self.aside = stream, aside
        self.terminal = stream.isatty()
        self.moves = self.terminal and os.environ.get("TERM") != "dumb"
        self.styled = self.moves and not os.environ.get("NO_COLOR")
        self.utf8 = "utf" in str(stream.encoding).lower()
        self.marks = MARKS if self.utf8 else PLAIN_MARKS
        self.pending, self.in_line = [], False
        self.busy = 0.0  # since when it is in a write, which can block

    def write(self, text, style=""):
        if not text:
            return
        if self.terminal:
            text = text.translate(VISIBLE)
        self.in_line = not text.endswith("\n")
        self.pending.append(f"\x1b[{style}m{text}\x1b[0m" if style and self.styled else text)
        if len(self.pending) > 500:  # a stream so fast that there is never a pause
            self.flush()

    def columns(self):
        """How wide the terminal is; 0 where there is none."""
        if not self.terminal:
            return 0
        return os.get_terminal_size(self.stream.fileno()).columns or 80

    def new_line(self):
        if self.in_line:
            self.write("\n")

    def say(self, text):
        self.write(text)
        self.flush()

    def let_go_if_stuck(self):
        """For a signal's handler: where nobody takes what is written, the write that waits and all
        later ones go nowhere.
        """
        if self.busy and time.monotonic() - self.busy > 0.5:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())

    def flush(self):
        text, self.pending = "".join(self.pending), []
        try:
            self.busy = time.monotonic()
            self.stream.write(text)
            self.stream.flush()
        except OSError:
            if not self.aside:
                raise
        finally:
            self.busy = 0.0


class Person:
    """Shows a turn to a person: thinking, then the answer; a status line while nothing has come
    yet.

    out gets the answer, side the rest; in the REPL they are one Pen.
    """

    def __init__(self, out, side):
        self.out, self.side, self.pens = out, side, [out, side]
        self.hide = self.quiet = self.stats = False
        # in a pipe of its own, the answer stays as it is; in one with stderr (2>&1) its last line
        # ends before other text
        one_file = os.path.sameopenfile(out.stream.fileno(), side.stream.fileno())
        self.shared = out.terminal or one_file
        self.ran = 0  # tool calls of this turn that ended well
        self.begin()

    def begin(self):
        """Forgets what was shown and waited for until now."""
        self.block = ""  # "thinking" or "answer": what stands on the screen and may go on
        self.newlines = ""  # the end of its text so far, which is shown when more follows
        self.has_status = False  # whether a status line stands on the screen
        self.doing = "waiting for the model"  # what it says
        self.since = time.monotonic()
        self.hidden = 0  # tokens of thinking

    def show(self, event):
        getattr(self, "on_" + event["type"])(event)

    def on_reasoning(self, event):
        if self.hide:
            self.hidden += 1
            self.doing = f"thinking, {self.hidden:,} tokens"
        else:
            self.flow("thinking", self.side, event["text"], THINKING)

    def on_answer(self, event):
        self.flow("answer", self.out, event["text"])

    def flow(self, block, pen, text, style=""):
        """Text of a block. On a terminal, a block begins and ends without blank lines: newlines
        wait for what follows.
        """
        if self.block != block:
            if pen.terminal:
                text = text.lstrip("\n")
            if not text:
                return
            self.close()
            self.block = block
            if pen.terminal:
                pen.write(pen.marks[block])
        if pen.terminal:
            complete = self.newlines + text
            text = complete.rstrip("\n")
            self.newlines = complete[len(text):]
        pen.write(text, style)

    def close(self):
        """Ends what stands on the screen, so that the next thing begins a line."""
        if self.has_status:
            self.side.pending.append(WIPE)
        self.begin()
        if self.shared:
            self.out.new_line()
        self.side.new_line()
        self.flush()

    def flush(self):
        for pen in self.pens:
            pen.flush()

    def on_waiting(self, event):
        self.flush()
        waited = time.monotonic() - self.since
        # the first second needs no status line
        if self.block or self.quiet or not self.side.moves or waited < 1:
            return
        if "summing_up" in event:
            self.doing = f"summing up, {event['summing_up']:,} tokens"
        status = f"{self.doing} · {waited:.0f} s"
        self.side.pending.append(WIPE)
        self.side.write(status[:self.side.columns() - 1], NOTICE)
        self.has_status = True
        self.side.in_line = False  # it is wiped, not ended
        self.side.flush()

    def on_progress(self, event):
        if event["total"] > 0:
            self.doing = f"reading the prompt {event['processed'] * 100 // event['total']} %"

    def note(self, text, style="", mark=""):
        """Shows text beside the answer, in lines of its own that begin with `mark`."""
        self.close()
        for line in text.split("\n"):
            self.side.write(f"{mark}{line}\n", style)
        self.flush()

    def on_notice(self, event):
        # a notice that explains the exit status is no chatter
        if not self.quiet or "kind" in event:
            self.note(event["message"], NOTICE, "mm: ")

    def on_retry(self, event):
        self.close()
        self.on_notice({"message": f"{event['reason']}; asking again"})

    def on_error(self, event):
        self.note(event["message"], ERROR, "mm: ")

    def on_tool_call(self, event):
        """Shows all of a call, as what is not seen is not permitted, and what it would change in a
        file.
        """
        self.out.new_line()  # the text before a call and after it are two things
        call, change = event["preview"]()
        call = INVISIBLE.sub(lambda char: f"<{ord(char.group()):04x}>", call.replace("\r", "␍"))
        self.note(self.side.marks["tool"] + call.replace("\n", "\n   │ "))
        for row in ends_of(change, 40):
            self.note(f"  {row[:300]}", CHANGES.get(row[:1], NOTICE))
        self.doing = "running, Ctrl-C ends it"

    def on_tool_result(self, event):
        for row in ends_of(event["output"].rstrip("\n").split("\n"), 6):
            self.note(f"  {row[:300]}", NOTICE if event["ok"] else ERROR)
        self.ran += event["ok"]

    def permit(self, name):
        """Asks a person whether a call may be made, which on_tool_call() has shown; -> "y", "n" or
        "a".
        """
        import termios
        # what was typed before the question is no answer to it
        termios.tcflush(sys.stdin, termios.TCIFLUSH)
        while True:
            self.side.say("  run this? y / n / a (always, this tool) ")
            line = os.read(sys.stdin.fileno(), 4096)  # of the terminal, which gives whole lines
            if not line:  # Ctrl-D
                return "n"
            self.side.in_line = False
            self.since = time.monotonic()  # from here on the tool is waited for
            answer = line.decode(errors="replace").strip().lower()
            if answer in ("y", "yes", "n", "no", "a", "always"):
                return answer[0]

    def on_done(self, event):
        self.out.new_line()
        self.close()
        if self.ran and self.out is self.side:
            self.note(f"{self.ran} tool call{'s' * (self.ran > 1)} in this turn", NOTICE)
        if self.stats:
            self.note(figures(event, self.side.columns(), self.side.marks), NOTICE)
        self.ran = 0


def ends_of(rows, most):
    """`rows`; of more than `most`, the first and the last with a row between that counts the rest.
    """
    if len(rows) <= most:
        return rows
    return [*rows[:most - 3], f"… {len(rows) - most + 1} lines …", *rows[-2:]]


class Ndjson:
    """Writes each event as one line of JSON."""

    def __init__(self, out):
        self.out, self.pens, self.hide = out, [out], False

    def show(self, event):
        kind = event["type"]
        if kind in EVENTS and not (self.hide and kind == "reasoning"):
            row = {key: event[key] for key in ("type", *EVENTS[kind]) if key in event}
            self.out.pending.append(json.dumps(row, ensure_ascii=not self.out.utf8) + "\n")
        if kind not in ("reasoning", "answer"):
            self.flush()

    def note(self, text):
        self.show(notice(text))

    def flush(self):
        self.out.flush()

    close = flush  # nothing stands on a screen


# -- figures (--stats)

def figures(done, columns=0, marks=MARKS):
    """A turn's figures: of thinking and answer; of the prompt and the whole turn.

    They are two lines on a terminal of so many `columns`, one elsewhere. Each has its tokens over
    time as a bar. The bars share one scale of time, and take about a third of the columns together.
    """
    seconds, rows = done["seconds"], done["timeline"].rows
    last = max((tenth for row in rows.values() for tenth in row), default=0)
    cells = min(48, columns // 3 or 48)
    thinking = binned(cells, last, rows["reasoning"])
    answer = binned(cells, last, rows["answer"], rows["call"])
    both, first, second = thinking + answer, [], []
    for kind, tokens, bins in zip(("thinking", "answer"), done["tokens"], (thinking, answer)):
        text, spent = f"{tokens:,} tok", seconds[kind]
        if spent > 0.05:
            text = f"{spent:.1f} s · {text} · {tokens / spent:,.0f} tok/s"
        if tokens:
            first.append(marks[kind] + text + bar(bins, both, marks["bar"]))
    prompt, cached, _, _ = counted_tokens(done["usage"], done["timings"])
    if prompt:
        from_cache = f", {cached:,} from cache" if cached else ""
        bins = binned(cells, last, rows["prompt"])
        second.append(f"prompt {prompt:,} tok{from_cache}" + bar(bins, bins, marks["bar"]))
    if seconds["first_token"]:
        second.append(f"first token after {seconds['first_token']:.1f} s")
    if seconds["total"]:
        second.append(f"{seconds['total']:.1f} s in all")
    lines = [" ".join(first), " · ".join(second)]
    return ("\n" if columns else " · ").join(filter(None, lines))


def binned(cells, last, *rows):
    """Rows of a Timeline as one: the tokens in spans of equal time, at most `cells` of them from
    the first tenth of a second to the last.
    """
    width = last // cells + 1
    bins = [0] * (last // width + 1)
    for row in rows:
        for tenth, tokens in row.items():
            bins[tenth // width] += tokens
    return bins


def bar(bins, scale, blocks):
    """A character for each span from the first with tokens to the last, the highest for the most
    in `scale`; "" where all came at once.
    """
    most = max([1, *scale])
    text = "".join(blocks[math.ceil(tokens * 8 / most)] for tokens in bins).strip()
    return f" {text}" if len(text) > 1 else ""


# -- a turn, shown; Ctrl-C in it

# of an error, by its kind; 1 for any other, and for a notice that there is no answer
EXIT_CODES = {"config": 2, "cancelled": 130}


def exit_code(event, before):
    """What an event makes of the exit code so far."""
    return EXIT_CODES.get(event["kind"], 1) if "kind" in event else before


def run_turn(conversation, turn, view):
    """Shows the events of a turn; -> exit code. Ctrl-C is the conversation's; one that it cannot
    use ends whatever else hangs.
    """
    code, given_up = 0, False

    def on_interrupt(*_):
        nonlocal given_up
        for pen in view.pens:
            pen.let_go_if_stuck()
        # once, as it ends the turn, and a hasty third Ctrl-C must not end more
        if not conversation.interrupt() and not given_up:
            given_up = True
            # nothing here may catch it: a handler can itself be interrupted by the next one
            raise KeyboardInterrupt

    view.close()
    before = on_signal(signal.SIGINT, on_interrupt)
    try:
        for event in turn:
            code = exit_code(event, code)
            view.show(event)
    except KeyboardInterrupt:
        turn.close()
        code = 130
        view.show({"type": "error", "kind": "cancelled", "message": "stopped"})
        view.show(conversation.done())
    finally:
        on_signal(signal.SIGINT, before)
    return code


# ==================================================================================================
# 12. The REPL
#
# A prompt without colours (readline counts them as visible), questions of several lines, commands
# in a table. Ctrl-C stops what runs and never ends mm; Ctrl-D does. The line editor of the kernel
# cuts a line at 4,095 bytes and says nothing, so mm reads through readline where it can and says
# what was cut where it cannot.
# ==================================================================================================

# /NAME and what stands behind it; a question that looks so may begin with a space
COMMAND = re.compile(r"/([a-z?]+)(?:[ \t](.*))?$", re.I)
ALIASES = {"?": "help", "exit": "bye", "quit": "bye"}
THINKING_STATES = {True: "on", False: "off", None: "auto"}
NO_SWITCH = ("how this server is told to think or not is not known: "
             "-p NAME says which server it is, -o passes a field of its own")
NO_RAW_TOOLS = "raw prompts take no tools, so the model will not hear of them"
NO_TOOLS = "the model's chat template takes no tools, so the model will not hear of them"
NO_WINDOW = " tokens; the server does not say how many it holds (contextWindow in the config)"


class Repl:
    """A conversation at the terminal, or with the lines of a pipe as its questions.

    The docstring of a method do_NAME is the line of its command in /help.
    """

    def __init__(self, conversation, view, history_file):
        self.conversation, self.view, self.say = conversation, view, view.note
        conversation.will_grow = True
        self.terminal = sys.stdin.isatty()
        self.history_file = history_file
        self.readline = None
        if self.terminal and view.out.terminal:
            self.open_readline()
        self.last_figures = "nothing was asked yet"
        self.code = 0  # exit code of the last turn that failed
        self.reading = False  # whether a line is being typed
        # whether what waits was typed during the answer: lines of their own, no paste
        self.typed_ahead = False

    def open_readline(self):
        """Gives input() its line editor, and the lines that were typed in earlier conversations."""
        try:
            import readline
        except ImportError:
            return
        paste = "on" if self.view.out.moves else "off"  # it writes escape sequences
        readline.parse_and_bind(f"set enable-bracketed-paste {paste}")
        readline.set_history_length(1000)  # of the file
        try:
            readline.read_history_file(self.history_file)
        except OSError:
            pass  # there is none yet, or none that can be read: it is a convenience
        self.readline, self.old_lines = readline, readline.get_current_history_length()

    def save_lines(self):
        """Appends what was typed, so that the lines of another conversation stay."""
        if not self.readline or not self.conversation.settings["save"]:
            return
        typed = self.readline.get_current_history_length() - self.old_lines
        try:
            os.makedirs(os.path.dirname(self.history_file), mode=0o700, exist_ok=True)
            open(self.history_file, "a").close()
            os.chmod(self.history_file, 0o600)
            self.readline.append_history_file(typed, self.history_file)
        except OSError:
            pass  # a read-only home is no fault of the conversation

    def run(self, question=""):
        """Until the input ends; -> exit code: 0 at a terminal, where a person saw what failed."""
        on_signal(signal.SIGINT, self.on_interrupt)
        if question:
            self.ask(question)
        if self.terminal:
            backend = self.conversation.backend
            server = f"{backend.name} at {show_url(backend.url)}, {backend.model}"
            self.say(f"{server} · /help lists commands, Ctrl-D leaves")
            self.advise()
        try:
            while True:
                self.one_question()
        except EOFError:  # Ctrl-D, the end of a pipe, /bye
            if self.terminal:
                self.say("")
        finally:
            self.save_lines()
        return 0 if self.terminal else self.code

    def advise(self):
        """Shows what the server says of itself. Nothing of that stops anything, as a server may be
        started after mm.
        """
        conversation = self.conversation
        answer = probe(conversation.backend)
        conversation.window = conversation.window or answer["window"]
        advice = [answer["fault"] or unknown_model(conversation.backend, answer["models"])]
        if answer["tools"] is False and conversation.toolbox.names:
            advice.append(NO_TOOLS)
        for line in filter(None, advice):
            self.say(f"mm: {line}")

    def one_question(self):
        """Reads and answers one. Whatever Ctrl-C interrupts, it does not end the conversation."""
        try:
            text = self.read_question()
            command = COMMAND.match(text)
            if command:
                self.command(*command.groups(""))
            elif text.strip():
                self.ask(text)
                self.typed_ahead = self.more_is_waiting(0)
        # SystemError: what readline makes of a dozen Ctrl-C at once (seen in CPython 3.11)
        except (KeyboardInterrupt, SystemError):
            self.say("\n(Ctrl-D or /bye leaves)")

    def ask(self, text, keep=None):
        turn = self.conversation.ask(text, keep)
        self.code = run_turn(self.conversation, turn, self.view) or self.code
        pen = self.view.out
        self.last_figures = figures(self.conversation.done(), pen.columns(), pen.marks)

    def read_question(self):
        """One question: a line; lines joined by a trailing backslash; a block between triple
        quotes; a paste. A command is always a line.
        """
        text = self.read_line("> ")
        block = text.lstrip().startswith('"""')
        try:
            while not COMMAND.match(text):
                if not self.typed_ahead and self.more_is_waiting(0.02):
                    prompt = ""
                elif block and text.count('"""') < 2:
                    prompt = ". "
                elif text.endswith("\\"):
                    text, prompt = text[:-1], ". "
                else:
                    break
                text += "\n" + self.read_line(prompt)
        except EOFError:
            pass  # what was typed until here is the question
        if block:
            text = text.replace('"""', "", 2)
        return text.strip("\n")

    def more_is_waiting(self, seconds):
        """Whether the terminal holds another line already: a paste, where bracketed paste is not to
        be had.
        """
        import select
        return self.terminal and select.select([sys.stdin], [], [], seconds)[0]

    def read_line(self, prompt):
        """A line without its end. Raises EOFError at the end of the input, KeyboardInterrupt at
        Ctrl-C.
        """
        self.reading = True
        try:
            return readable(self.typed_line(prompt) if self.terminal else piped_line())
        finally:
            self.reading = False

    def typed_line(self, prompt):
        line = input(prompt)
        if not self.readline and len(os.fsencode(line)) >= 4095:
            self.say("the terminal may have cut this line at 4,095 bytes: "
                     "use -f FILE or a pipe for long text")
        return line

    def on_interrupt(self, *_):
        """Ctrl-C outside a turn: it takes away what is being typed, once; a hasty second one,
        between two lines, would end mm.
        """
        if self.reading:
            self.reading = False
            raise KeyboardInterrupt

    def command(self, name, rest):
        """Runs the method of a command, do_NAME."""
        name = name.lower()
        method = getattr(self, "do_" + ALIASES.get(name, name), None)
        if not method:
            self.say(f"there is no command /{name}: /help lists them "
                     "(a question may begin with a space)")
            return
        try:
            method(rest.strip())
        except MMError as error:
            self.say(error.message)

    def do_help(self, rest):
        """/help                   this list"""
        for name, method in vars(Repl).items():
            if name.startswith("do_"):
                self.say(f"  {method.__doc__}")
        self.say('  A line ending in \\ goes on in the next; """ begins and ends a block. '
                 "Ctrl-C stops an answer.")

    def do_clear(self, rest):
        """/clear                  forget the conversation"""
        self.conversation.clear()
        self.say("forgotten: the conversation begins anew")

    def do_model(self, rest):
        """/model [NAME]           say or change the model"""
        if rest:
            self.conversation.use(model=rest)
            self.advise()
        self.say(f"model: {self.conversation.backend.model}")

    def do_models(self, rest):
        """/models                 list the server's models"""
        backend = self.conversation.backend
        for name in list_models(backend):
            mark = "*" if same_model(name, backend.model) else " "
            self.say(f"{mark} {name}")

    def do_think(self, rest):
        """/think [on|off|auto]    ask the server to think or not"""
        conversation = self.conversation
        for state, word in THINKING_STATES.items():
            if word == rest:
                conversation.think = state
        if not can_switch_thinking(conversation):
            self.say(NO_SWITCH)
        self.say(f"thinking: {THINKING_STATES[conversation.think]} (/think on, off or auto)")

    def do_show(self, rest):
        """/show [on|off]          show or hide the thinking"""
        if rest in ("on", "off"):
            self.view.hide = rest == "off"
        state = "hidden" if self.view.hide else "shown"
        self.say(f"the thinking is {state} (/show on or off)")

    def do_system(self, rest):
        """/system [TEXT|-]        say, set or (-) drop the system prompt"""
        if rest:
            self.conversation.use(system="" if rest == "-" else rest)
        self.say(f"system: {self.conversation.system or '(none)'}")

    def do_stats(self, rest):
        """/stats                  figures of the last answer, and how full the context is"""
        self.say(self.last_figures)
        size, window = self.conversation.size(), self.conversation.find_window()
        limit = NO_WINDOW
        if window:
            limit = f" of {window:,} tokens ({size * 100 // window} %)"
        self.say(f"context: about {size:,}{limit}")

    def do_tools(self, rest):
        """/tools [NAME|all|none]  list the tools, switch one or all"""
        box = self.conversation.toolbox
        tools = box.known()
        names = set(rest.replace(",", " ").split())
        for name in names.difference(tools, ["all", "none"]):
            self.say(f"there is no tool called {name}")
        switched = {"all": tools, "none": ()}.get(rest, names.symmetric_difference(box.names))
        box.names = [name for name in tools if name in switched]
        for name, (what, _) in tools.items():
            mark = "x" if name in box.names else " "
            self.say(f"  [{mark}] {name}  {one_line(what, 70)}")
        if box.names and not self.conversation.protocol.applies_template:
            self.say(NO_RAW_TOOLS)

    def do_retry(self, rest):
        """/retry                  ask the last question again"""
        history = self.conversation.history
        for index in reversed(range(len(history))):
            text = history[index]["content"]
            if history[index]["role"] == "user" and not text.startswith(SUMMED_UP):
                return self.ask(text, history[:index])
        self.say("nothing was asked yet")

    def do_compact(self, rest):
        """/compact                replace what was said by a summary"""
        conversation = self.conversation
        before = conversation.size()
        conversation.begin()
        work = conversation.guarded(conversation.compact(everything=True))
        if run_turn(conversation, work, self.view) == 0:
            self.say(f"context: about {before:,} tokens before, {conversation.size():,} now")

    def do_sessions(self, rest):
        """/sessions               list the saved conversations"""
        session = self.conversation.session
        for line in session_lines(20):
            mark = "*" if session and line.startswith(session.id) else " "
            self.say(f"{mark} {line}")
        self.say("  mm -r ID goes on with one of them")

    def do_save(self, rest):
        """/save FILE              write the conversation into a Markdown file"""
        if not rest:
            return self.say("say /save FILE")
        text = as_markdown(self.conversation.history, self.conversation.system)
        try:
            with open(os.path.expanduser(rest), "x", encoding="utf-8", errors="replace") as file:
                file.write(text)
        except OSError as error:
            return self.say(f"{rest}: {error.strerror}")
        self.say(f"saved to {rest}")

    def do_bye(self, rest):
        """/bye                    leave (also /exit, /quit, Ctrl-D)"""
        raise EOFError


def piped_line():
    """The next line of standard input. Raises EOFError at its end."""
    line = sys.stdin.readline(MOST_TEXT + 1)
    if not line:
        raise EOFError
    if len(line) > MOST_TEXT:
        raise MMError("config", f"standard input has a line of more than {MOST_TEXT >> 20} MiB")
    return line.rstrip("\n")


def list_models(backend):
    """The server's model ids, in its own order of use. Raises MMError where it tells none."""
    answer = probe(backend)
    if answer["fault"]:
        raise answer["fault"]
    return answer["models"]


def can_switch_thinking(conversation):
    """Whether what is wanted of the thinking changes the request, or how its answer is read
    (ThinkTags).
    """
    entry = conversation.backend.entry
    return conversation.think is None or entry["thinking"] or conversation.protocol.tags(None)


# ==================================================================================================
# 13. Demo and replay
#
# What mm looks like without a model: a scripted server on loopback, which is asked like any other
# and says what it is, and a recorded stream (--tap FILE), which gives the events of the model's
# part again.
# ==================================================================================================

DEMO_THOUGHTS = """The question was: {question}
I am no model, only a script inside mm, so I cannot know. But I can show how it looks when one \
thinks: this text comes in delta.reasoning_content, a token at a time, and each token tells mm \
that I am alive."""
DEMO_ANSWER = """This is a scripted answer, not a model's. It came in delta.content, after the \
thinking. To ask a model, start a server (such as `llama-server -m MODEL.gguf`) and leave --demo \
out."""
DEMO_MODELS = b'{"object": "list", "data": [{"id": "scripted", "object": "model"}]}'
DEMO_START = b"""data: {"choices": [{"finish_reason": null, "index": 0, "delta": \
{"role": "assistant", "content": null}}], \
"prompt_progress": {"total": 32, "cache": 0, "processed": 32}}

"""
DEMO_END = b"""data: {"choices": [{"finish_reason": "stop", "index": 0, "delta": {}}]}

data: [DONE]

"""
PACE = 0.02  # seconds a token: about what a small model takes, and what can be read along


def demo_stream(question):
    """The bytes of the scripted stream, shaped like llama.cpp's, a token at a time."""
    yield DEMO_START
    thoughts = DEMO_THOUGHTS.format(question=one_line(question, 200))
    for field, text in (("reasoning_content", thoughts), ("content", DEMO_ANSWER)):
        for word in re.findall(r"\s*\S+", text):
            chunk = {"choices": [{"index": 0, "delta": {field: word}}]}
            yield f"data: {json.dumps(chunk)}\n\n".encode()
            time.sleep(PACE)
    yield DEMO_END


def start_demo():
    """Starts the scripted server on a free loopback port; -> (Backend, [notices])."""
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args):
            """Standard error is for what mm says."""

        def do_GET(self):
            self.answer([DEMO_MODELS])

        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.answer(demo_stream(request["messages"][-1]["content"]))

        def answer(self, pieces):
            self.send_response(200)
            self.end_headers()
            self.wfile.writelines(pieces)

    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *_: None  # the question was withdrawn
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    return Backend("demo", {"model": "scripted"}, url), ["--demo: a script answers, not a model"]


def replay(path, settings):
    """The events of a recorded stream, or of several, one after another. Raises MMError("config")
    if it cannot be read.

    A recording does not tell its server: only with its provider named is it read as by that
    provider's protocol and thinkTags.
    """
    entry = provider_table(settings).get(settings["provider"].strip(), PLAIN)
    backend = Backend("replay", entry, "http://replay")
    protocol = PROTOCOLS[backend.entry["protocol"]](backend)
    # the streams of a tap stand one after another; one without [DONE] runs into the next
    raw = read_bytes(path, "--replay")
    replies = []
    for stream in re.findall(rb"(?ms).+?(?:^data: ?\[DONE\]\s*|\Z)", raw) or [b""]:
        reply = Reply()
        replies.append(reply)
        try:
            lines = b"".join(iter(Tap(io.BytesIO(stream)).read, b"")).splitlines()
            tags = protocol.tags(settings["think"])
            yield from read_reply(deltas(lines, backend, path), reply, tags)
            calls = reply.finished_calls()
            for call in calls:
                if call["arguments"] is not None:
                    plain = f"{call['name']} {call['raw']}", []
                    yield {**tool_call_event(call), "preview": lambda: plain}
            if not calls:
                yield from verdict(reply)
        except MMError as error:
            yield error_event(error)
    done = done_event("replay", replies[-1].model, None, replies, started=0.0)
    done["seconds"] = recorded_seconds(replies, *done["tokens"])
    yield done


def recorded_seconds(replies, thinking, answer):
    """`done`'s seconds of a recorded stream, from llama.cpp's timings in it: the time that its
    replay takes means nothing. thinking, answer: tokens.
    """
    prompt = produced = 0.0
    for reply in replies:
        timings = reply.timings or {}
        prompt += as_int(timings.get("prompt_ms")) / 1000
        produced += as_int(timings.get("predicted_ms")) / 1000
    thought = produced * thinking / max(1, thinking + answer)
    return {
        "first_token": rounded(prompt or None), "thinking": rounded(thought),
        "answer": rounded(produced - thought), "total": rounded(prompt + produced or None),
    }


# ==================================================================================================
# 14. The command line
#
# Options, a row each: a new one is a row of OPTIONS, or of SETTINGS where the config file has it
# too. At the end stands run(), in the order of the path that a question takes. What needs no server
# comes first. A fault of the command line or the config is told before standard input is read,
# which may take long, and before a server is asked. --tap's file is emptied last.
# ==================================================================================================

# key of the parsed arguments: (option, what argparse does with it, help); those that are settings
# stand in SETTINGS
OPTIONS = {
    "file": ("-f, --file PATH", "append", "add a text file to the question (repeatable)"),
    "option": ("-o, --option KEY=VALUE", "append",
               "a field of the request, such as temperature=0 (repeatable; dots nest)"),
    "interactive": ("-i, --interactive", "store_true",
                    "a conversation, after the question if there is one"),
    "json": ("--json", "store_true", "events on stdout, one JSON object a line"),
    "quiet": ("-q, --quiet", "store_true", "no notices and no status line"),
    "stats": ("--stats", "store_true", "figures after the answer, and tokens over time"),
    "yes": ("-y, --yes", "store_true", "run tools without asking"),
    "last": ("-c, --continue", "store_true", "go on with the last conversation"),
    "resume": ("-r, --resume ID", "store", "go on with the one whose id begins so"),
    "sessions": ("--sessions", "store_true", "list the saved conversations"),
    "tap": ("--tap FILE", "store", "record the stream's bytes exactly as they come"),
    "replay": ("--replay FILE", "store", "show a recorded stream; no server is asked"),
    "template_of": ("--template-of FILE", "store",
                    "print the chat template in a GGUF file, and which of mm's formats it is"),
    "check": ("--check", "store_true", "say what would be used and whether it answers"),
    "models": ("--models", "store_true", "list the server's models"),
    "demo": ("--demo", "store_true", "answer from a script inside mm; no model is needed"),
    "config": ("--config FILE", "store",
               "configuration file (config.example.yaml shows all keys)"),
}


def parser():
    import argparse

    class Parser(argparse.ArgumentParser):
        def error(self, message):
            raise MMError("config", f"{message} (mm --help)")

    def layout(prog):
        return argparse.RawDescriptionHelpFormatter(prog, max_help_position=30)

    p = Parser(
        prog="mm", usage="mm [options] [question ...]", allow_abbrev=False, formatter_class=layout,
        description="Asks a language model a question and shows it think, live, before it answers."
                    "\nPiped text is added after the question; with no question and no pipe, "
                    "a conversation begins.",
        epilog=f"providers: {', '.join(PROVIDERS)}, or one from the config file\n"
               "exit codes: 0 answered, 1 the server or the stream failed or no answer came, "
               "2 usage or configuration, 130 Ctrl-C")

    def add(key, option, action, words, **more):
        names = option.replace(",", "").split()
        if not names[-1].startswith("-"):
            more["metavar"] = names.pop()
        p.add_argument(*names, dest=key, action=action, default=None, help=words, **more)

    p.add_argument("question", nargs="*", help=argparse.SUPPRESS)
    for key, (kind, default, _, option, words) in SETTINGS.items():
        if option and kind == "flag":
            add(key, option, "store_false" if default else argparse.BooleanOptionalAction, words)
        elif option:
            words += f" ({default:g})" if type(default) in (int, float) else ""
            add(key, option, "store", words, type=readable)
    for key, (option, action, words) in OPTIONS.items():
        add(key, option, action, words)
    p.add_argument("--version", action="version", version=f"mm {__version__}")
    p.set_defaults(file=[], option=[], resume="", config="")
    return p


def parsed(argv):
    """The arguments of a command line; `interactive`: a conversation follows; `attended`: a person
    can be asked, and can end the thinking.
    """
    # argparse loses what stands behind "--" when options and words mix
    end = argv.index("--") if "--" in argv else len(argv)
    args = parser().parse_intermixed_args(argv[:end])
    words = readable(" ".join(args.question + argv[end + 1:]))
    args.question = words if words.strip() else ""
    at_terminal = sys.stdin.isatty()
    if at_terminal and not args.question and not args.file:
        args.interactive = True
    args.attended = at_terminal and not args.json
    return args


def settings_of(args):
    """The settings of a run. A blank option counts as not given, but for `-s ""`, which drops the
    config's system prompt.
    """
    given = {key: value for key, value in vars(args).items()
             if str(value).strip() or key == "system"}
    return load_settings(given, args.config)


def sampling_options(pairs):
    """-o KEY=VALUE pairs as a dict; dots nest, VALUE is JSON if it parses. Raises
    MMError("config").
    """
    out = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise MMError("config", f"-o {pair}: wants KEY=VALUE")
        if key in ("model", "messages", "tools", "prompt"):
            raise MMError("config", f"-o {key}: mm fills it in itself")
        field = json_or_text(value)
        for part in reversed(key.split(".")):
            field = {part: field}
        out = merged(out, field)
    return out


def tell(view, *notices):
    for message in notices:
        view.show(notice(message))


# -- the question

def question_of(args, view):
    """The question: its words, files and piped text. Raises MMError("config") where there is none,
    unless a conversation follows.
    """
    parts = [args.question] + [fenced(path, view) for path in args.file]
    if not args.interactive:
        parts.append(piped_text(view))
    question = "\n\n".join(filter(str.strip, parts))
    if not question and not args.interactive:
        raise MMError("config", 'there is no question: mm "your question", or pipe one in '
                                "(mm --help)")
    return question


UTF_16 = (b"\xff\xfe", b"\xfe\xff")  # how a text of that encoding begins


def fenced(path, view):
    """A file of text, named, between fences that are longer than any in it."""
    raw = read_bytes(path, "-f")
    unreadable_bytes = raw.decode("utf-8", "replace").count("\ufffd") + raw.count(b"\0")
    if unreadable_bytes > max(10, len(raw) // 20) and raw[:2] not in UTF_16:
        raise MMError("config", f"-f {readable(path)}: this is no text ({len(raw):,} bytes)")
    text = as_text(raw, path, view).rstrip()
    longest = max(map(len, re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{readable(path)}:\n{fence}\n{text}\n{fence}"


def piped_text(view):
    """What was piped into mm, or "" when stdin is a terminal, closed or empty."""
    import select
    if sys.stdin.isatty():
        return ""
    if not select.select([sys.stdin], [], [], 2.0)[0]:
        tell(view, "waiting for the end of standard input (`< /dev/null` if none is meant)")
    try:
        raw = sys.stdin.buffer.read(MOST_TEXT + 1)
    except OSError:
        return ""  # nohup hands over one that cannot be read
    if len(raw) > MOST_TEXT:
        raise MMError("config", f"standard input is larger than {MOST_TEXT >> 20} MiB")
    return as_text(raw, "standard input", view).rstrip("\n")


def as_text(raw, name, view):
    """Bytes of a file or a pipe as text: UTF-8, or UTF-16 if they begin so. What is neither is
    replaced, with a notice.
    """
    encoding = "utf-16" if raw[:2] in UTF_16 else "utf-8-sig"
    text = raw.decode(encoding, "replace").replace("\0", "\ufffd")
    if "\ufffd" in text:
        tell(view, f"{name} is not all UTF-8 text: what could not be read is \ufffd now")
    return text


# -- the conversation

def resumed(args, settings, view):
    """-> (the resumed session's path or "", its history). What it remembers becomes a setting,
    unless an option says otherwise.
    """
    if not args.resume.strip() and not args.last:
        return "", []
    path = find_session(args.resume.strip())
    about, history, damage = load_session(path)
    source = f"session {session_id(path)}"
    questions = [message["content"] for message in history if message["role"] == "user"]
    last = one_line(questions[-1], 60) if questions else "nothing"
    tell(view, f"{source}, {len(history)} messages; asked last: {last}", *damage)
    chosen = {key for key in about if settings.is_option(key)}
    server = settings["provider"] if settings.is_option("provider") else ""
    if settings.is_option("url"):
        server = show_url(base_url(settings["url"])[0])
    if server:
        chosen |= {"provider", "url"}
        if server != (about.get("url") or about.get("provider")):
            chosen.add("model")  # the one that it remembers is another server's
    for key, value in about.items():
        if value and key not in chosen:
            settings.put(key, value, source)
    return path, history


def make_toolbox(args, settings, view):
    """The tools that are offered. Raises MMError("config") for one that there is not."""
    commands = check_commands(settings["commands"], settings.source("commands"))
    hidden = {entry.get("apiKeyEnv") for entry in provider_table(settings).values()}
    permit = view.permit if args.attended and view.side.terminal else None
    if args.yes:
        permit = lambda name: "y"
    toolbox = Toolbox([], commands, settings["commandTimeout"], hidden, permit)
    names, known = set(settings["tools"]), [*toolbox.known(), "all", "none"]
    for name in names.difference(known):
        hint, where = did_you_mean(name, known), settings.source("tools")
        raise MMError("config", f"{where}: no tool is called {one_line(name, 40)}{hint}: "
                                f"{', '.join(known)}")
    toolbox.names = [name for name in toolbox.known() if name in names or "all" in names]
    return toolbox


def make_session(settings, backend, view, path):
    """The Session of a conversation; path: of the one that is resumed, or ""."""
    about = {
        "provider": "" if backend.plain else backend.name,
        "model": backend.model,
        "url": show_url(backend.url) if settings["url"] else "",
        "system": settings["system"],
    }
    session = Session(about, lambda message: tell(view, message), path)
    if path and any(settings.is_option(key) for key in ("provider", "model", "url")):
        session.record(about)
    return session


def no_tools_reason(backend, takes_tools):
    """Why the model will not hear of tools, or "". takes_tools: what probe() says of them."""
    if not PROTOCOLS[backend.entry["protocol"]].applies_template:
        return NO_RAW_TOOLS
    return NO_TOOLS if takes_tools is False else ""


def without_effect(conversation, asks_server):
    """Notices of what was asked for and will have no effect.

    asks_server: whether the server is asked if it takes tools (the REPL asks it anyway).
    """
    backend, tools = conversation.backend, conversation.toolbox.names
    if not conversation.protocol.applies_template and not backend.entry["template"]:
        yield "no template is named for the raw prompts: chatml is used (template in the config)"
    asks_server = asks_server and tools and backend.entry["tools"]
    reason = no_tools_reason(backend, probe(backend)["tools"] if asks_server else None)
    if tools and reason:
        yield reason
    if not can_switch_thinking(conversation):
        yield NO_SWITCH


# -- what needs no conversation

def check(backend, settings, view):
    """--check: what would be used and whether it answers; -> exit code."""
    answer, model = probe(backend), backend.model or "none named: -m MODEL"
    models = answer["models"] or []
    if models and not backend.model and takes_first_model(backend):
        model = models[0]
    elif backend.model and unknown_model(backend, models):
        model += " (not in the server's list)"
    key = backend.entry.get("apiKeyEnv") or "MM_API_KEY"
    tools = "the model's template takes them" if answer["tools"] else "not told"
    fault, count = answer["fault"], len(models)
    rows = {
        "provider": backend.name,
        "url": show_url(backend.url),
        "model": model,
        "key": f"{'from' if backend.key else 'none in'} ${key}",
        "answers": f"no: {fault.message}" if fault else f"yes, {count} model{'s' * (count != 1)}",
        "context": f"{answer['window']:,} tokens" if answer["window"] else "not told",
        "tools": no_tools_reason(backend, answer["tools"]) or tools,
        "config": settings.file or "none",
    }
    print_rows([f"{name:<9} {value}" for name, value in rows.items()], view)
    return 1 if fault else 0


def print_rows(rows, view):
    view.out.write("".join(f"{row}\n" for row in rows))
    view.flush()
    return 0


def show_replay(path, settings, view):
    """--replay: a recorded stream, on a terminal at a pace that can be read; -> exit code."""
    code = 0
    for event in replay(path, settings):
        code = exit_code(event, code)
        view.show(event)
        if view.out.terminal and "text" in event:
            view.flush()
            time.sleep(PACE)
    return code


def show_template(path, view):
    """--template-of: the template on stdout, and what mm makes of it beside it."""
    template, form, end = template_of(path)
    note = f"template: {form or 'none of ' + ', '.join(TEMPLATES)}"
    if end:
        note += f" · end of turn: {end}"
    if THINK in template:
        note += " · it knows <think> (thinkTags: true has the block opened in the prompt)"
    print_rows([template.rstrip("\n")], view)
    tell(view, note)
    return 0


# -- a run

def run(args, view):
    """Carries out a parsed command line; -> exit code. Raises MMError."""
    if args.template_of:
        return show_template(args.template_of, view)
    if args.sessions:
        return print_rows(session_lines(), view)
    settings = settings_of(args)
    if not args.json or settings.is_option("showThinking"):  # a program asks for its own
        view.hide = not settings["showThinking"]
    if args.replay:
        return show_replay(args.replay, settings, view)
    if args.interactive and view.out.terminal:
        view.side = view.out  # all on one screen
    tell(view, *settings.notices)
    path, history = resumed(args, settings, view)
    sampling, toolbox = sampling_options(args.option), make_toolbox(args, settings, view)
    need_requests()  # or a pipe would be read in vain
    named = start_demo() if args.demo else named_backend(settings)
    looks = args.check or args.models
    question = "" if looks else question_of(args, view)
    backend, notices = resolve(settings, needs_model=not looks, named=named)
    tell(view, *notices)
    if args.check:
        return check(backend, settings, view)
    if args.models:
        return print_rows(list_models(backend), view)
    backend.entry["sampling"] = merged(backend.entry["sampling"], sampling)
    session = None
    if settings["save"] and not args.demo:
        session = make_session(settings, backend, view, path)
    conversation = Conversation(
        backend, settings, toolbox, session and session.record, session,
        restartable=args.json or sys.stdout.isatty(), end_thinking=args.attended,
        tap=open_tap(args.tap))
    conversation.history += history
    tell(view, *without_effect(conversation, asks_server=not args.interactive))
    if args.interactive:
        typed = os.path.join(xdg_home("XDG_STATE_HOME", ".local/state"), "history")
        return Repl(conversation, view, typed).run(question)
    return run_turn(conversation, conversation.ask(question), view)


def open_tap(path):
    """--tap's file, or None. Called once there is a server to ask, as it empties the file."""
    try:
        return open(path, "wb", buffering=0) if path else None
    except OSError as error:
        raise MMError("config", f"--tap {path}: {error.strerror}") from None


def prepare_imports():
    """Makes the import of requests quick and quiet."""
    import gc
    import warnings
    gc.set_threshold(50_000, 20, 20)  # it makes many objects, which all stay
    if not sys.warnoptions:
        # requests has some for its programmers: "chardet … doesn't match a supported version!"
        warnings.simplefilter("ignore")


def prepare_streams():
    """Opens the streams that the caller has closed; output never raises for a character."""
    # /dev/full fails, as any output that cannot be written should
    full = "/dev/full" if os.path.exists("/dev/full") else os.devnull
    for name, path, mode in (("stdin", os.devnull, "r"), ("stdout", full, "w"),
                             ("stderr", os.devnull, "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(path, mode))
        # a parent can hand over a pipe that does not block: a write would lose what does not fit
        os.set_blocking(getattr(sys, name).fileno(), True)
    # Python's own sign of the C locale, which mostly means that none is set: UTF-8 is meant
    encoding = "utf-8" if sys.stdout.errors == "surrogateescape" else None
    sys.stdin.reconfigure(errors="surrogateescape")
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding=encoding, errors="replace")


def answered(argv, out, side):
    """Runs a command line; -> exit code. A fault of it, or of the server, becomes an error event.
    """
    view = Ndjson(out) if "--json" in argv else Person(out, side)
    try:
        args = parsed(argv)
        view.quiet, view.stats = args.quiet, args.stats
        return run(args, view)
    except MMError as error:
        event = error_event(error)
        view.show(event)
        return exit_code(event, 1)
    finally:
        view.close()
        sys.stdout.flush()  # of --help, too


def main():
    """-> exit code. Whatever goes wrong becomes one line; a closed pipe ends mm quietly."""
    prepare_imports()
    prepare_streams()
    out, side = Pen(sys.stdout), Pen(sys.stderr, aside=True)
    ending = False

    def end(number, _):
        """Ends mm by an exception, so that what is open is closed, and a command ended; at the
        second signal, at once.
        """
        nonlocal ending
        out.let_go_if_stuck()
        side.let_go_if_stuck()
        if ending:
            os._exit(128 + number)
        ending = True
        raise SystemExit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        on_signal(number, end)
    try:
        return answered(sys.argv[1:], out, side)
    except SystemExit as error:  # --help, or a signal
        return error.code
    except KeyboardInterrupt:
        return 130
    except OSError as error:  # of writing the output: all else is told where it is done
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that Python's own last flush is quiet
        if not isinstance(error, BrokenPipeError):
            side.say(f"mm: the output cannot be written: {error.strerror}\n")
        return 1
    except Exception as error:  # a fault of mm's own, which a traceback would not mend for its user
        side.say(f"mm: this is a fault in mm: {type(error).__name__}: {one_line(error, 300)}\n")
        return 1
    finally:
        ending = True


if __name__ == "__main__":
    # everything is written; taking the modules down would take as long as a tenth of a one-shot
    os._exit(main())
