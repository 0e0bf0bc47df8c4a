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
        os._exit(0)
    except OSError:
        pass  # the usual way ends in a line that says why

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
    # while mm is loading, Ctrl-C ends it without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import io
import json
import math
import queue
import re
import threading
import time
from urllib.parse import quote, urljoin, urlsplit


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


def as_dict(value):
    """A dict as it is; {} for anything else: null means absent, everywhere."""
    return value if isinstance(value, dict) else {}


def dicts_in(value):
    """The dicts in a list; [] for anything else."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


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
        kind = SETTINGS[key][0]
        self.values[key], self.sources[key] = self.convert(value, kind, source), source

    def convert(self, value, kind, source):
        """`value` as its kind wants it; else None, and a fault that begins with the source."""
        read, wanted = KINDS[kind]
        try:
            return read[str(value).lower()] if isinstance(read, dict) else read(value)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            # a map could hold a key, and a variable's name could be one
            is_shown = isinstance(value, str) and kind != "variable"
            shown = f", not '{one_line(value, 60)}'" if is_shown else ""
            self.faults.append(f"{source}: wants {wanted}{shown}")

    def read_map(self, data, kinds, prefix):
        """{key: value} of a map in the config file, each value as its kind in `kinds` wants it.

        prefix: what stands before the key where a line names it.
        """
        if not isinstance(data, dict):
            self.faults.append(f"{prefix} wants keys and values, such as `model: qwen3`")
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
        where = f"{self.file}: "
        data = parse_config(read_bytes(self.file, named_by), where)
        for key, value in self.read_map(data, FILE_KEYS, where).items():
            self.values[key], self.sources[key] = value, where + key
        providers = self["providers"] or {}
        for name, entry in providers.items():
            providers[name] = self.read_map(entry, PROVIDER_KEYS, f"{where}providers.{name}.")


def load_settings(options, config=""):
    """The settings of a run. options: {key: value} from the command line; config: --config's value.

    A blank option counts as not given, but for `-s ""`, which drops the config's system prompt.
    Raises MMError("config") with one line per fault. (A session that is resumed comes later, in
    section 14.)
    """
    settings = Settings()
    settings.file, named_by = config_path(config)
    if settings.file:
        settings.take_file(named_by)
    for key, (_, _, variable, option, _) in SETTINGS.items():
        value = from_environment(variable)
        if value:
            settings.put(key, value, f"${variable}")
        value = options.get(key)
        if value is not None and (str(value).strip() or key == "system"):
            settings.put(key, value, "".join(re.findall("--[a-z-]+", option)))
    if settings.faults:
        raise MMError("config", "\n".join(settings.faults))
    return settings


def from_environment(variable):
    """A variable's value; blank is the same as not set: ""."""
    return os.environ.get(variable, "").strip()


def config_path(option):
    """-> (path, what named it); the path is "" where there is no config file, and one that was
    named must be there.
    """
    if option.strip():
        return option, "--config"
    variable = from_environment("MM_CONFIG")
    if variable:
        return os.path.expanduser(variable), "$MM_CONFIG"
    beside = os.path.dirname(os.path.realpath(__file__))
    if os.path.isfile(beside):  # mm.pyz: beside it, not in it
        beside = os.path.dirname(beside)
    for folder in (beside, xdg_home("XDG_CONFIG_HOME", ".config")):
        path = os.path.join(folder, "config.yaml")
        if os.path.isfile(path):
            return path, "the config file"
    return "", ""


def xdg_home(variable, default):
    """mm's folder below an XDG base directory; a relative or blank value counts as not set (XDG
    base directory spec).
    """
    base = from_environment(variable)
    if not os.path.isabs(base):
        base = os.path.join(home(), default)
    return os.path.join(base, "mm")


def home():
    """The user's folder; for a container's user without one, a path below which nothing can be."""
    try:
        import pwd
        known = pwd.getpwuid(os.getuid()).pw_dir
    except (ImportError, KeyError):
        known = os.devnull
    return from_environment("HOME") or known


def parse_config(raw, where):
    """The data in a config file's bytes, JSON or YAML; YAML's scalars stay text. Raises MMError,
    its message beginning with `where`.
    """
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise MMError("config", f"{where}line {line}: not UTF-8 text") from None
    try:
        return read_json(text.strip() or "{}")  # first, as YAML forbids the tabs that JSON allows
    except ValueError as error:
        return parse_yaml(text, where, error)


def parse_yaml(text, where, json_error):
    try:
        import yaml
        return yaml.load(text, Loader=yaml.BaseLoader) or {}
    except ImportError:
        raise MMError("config", f"{where}this is no JSON ({json_error}), and YAML needs PyYAML: "
                                f"{sys.executable} -m pip install pyyaml") from None
    except yaml.MarkedYAMLError as error:  # its own text quotes the line, which may hold a key
        line = error.problem_mark.line + 1
        problem = error.problem.replace("character '\\t'", "a tab")
        raise MMError("config", f"{where}line {line}: {problem}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise MMError("config", where + one_line(error)) from None


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
    ((), r"(?i)(not support|unsupported|unrecognized).{0,60}\btools\b|support tool use"
         r"|\btools\b.{0,30}not (supported|permitted)", "server", "", "tools"),
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
     "server", "the server behind {url} did not answer: is it running?", "busy"),
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
    field = backend.refused_field(message) if status in (400, 422) and not again else ""
    if field:
        again = "field"

    advice = advice.format(**{**backend.advice(), "url": url})
    message = compose(message, f"HTTP {status}" if status else "", advice)
    return MMError(kind, message, again, wait, field, int(window))


def number_in(text, key):
    """The number at a key, wherever it stands in the text of some JSON, or 0."""
    found = re.search(rf'"{key}"[\s:"]+(\d{{1,12}}(\.\d{{1,6}})?)', text)
    return float(found.group(1)) if found else 0


def find_hint(status, message, text):
    """(kind, what to do, what may be tried) of the first row of HINTS that fits an error."""
    codes = re.findall(r'"(?:code|type)"\s*:\s*"(\w{1,60})"', text)  # OpenAI's say more
    words = " ".join([message, *codes])
    for statuses, pattern, *hint in HINTS:
        if (status in statuses or not statuses) and re.search(pattern, words):
            return hint


def compose(message, code, advice):
    """'the message (HTTP 404): what to do', cut in the message, so that the advice survives."""
    tail = f" ({code})" if code else ""
    if advice:
        tail += f": {advice}"
    return one_line(message, 500 - len(tail)).rstrip(".: ") + tail


def show_url(url):
    """A URL as it may be shown: without a user, password or query, which can hold keys."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


UNDIALLED = "NewConnectionError|ConnectTimeoutError|NameResolutionError"  # of urllib3
# (names of exceptions; kind; the message; what may be tried). Names, as the classes stand in other
# modules in urllib3 1.26 and 2, and importing them takes time.
EXCEPTIONS = (
    ("ProxyError|InvalidProxyURL|InvalidSchema", "unreachable",
     "the proxy {proxy} (from the environment) did not connect: {reason}; "
     "set NO_PROXY={host} to go round it", ""),
    ("handshake.*timed out|SSLError.*(WRONG_VERSION|RECORD_LAYER|timed out)", "unreachable",
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
    ("", "interrupted", "the connection to {url} was cut before an answer came ({reason})", "stream"),
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
    words = {**backend.advice(), "proxy": show_url(proxy), "reason": one_line(reason, 200)}
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
# reasoning_control is for Protocol.end_thinking()
LLAMA_FIELDS = {**USAGE, "return_progress": True, "reasoning_control": True}
EFFORT = {"on": {"reasoning_effort": "medium"}, "off": {"reasoning_effort": "none"}}
TEMPLATE_SWITCH = {"on": {"chat_template_kwargs": {"enable_thinking": True}},
                   "off": {"chat_template_kwargs": {"enable_thinking": False}}}
BOTH_SWITCHES = {  # Qwen's templates read enable_thinking, DeepSeek's and Granite's read thinking
    "on": {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}},
    "off": {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}}}

LLAMA_PROPS = "/props?model={model}&autoload=false"

PROVIDERS = {
    # url, fallback  base URLs; the others are asked when the first does not answer
    # local          it runs on the user's own machines: it is found by itself, its first model is
    #                used, thinking may go back to it
    # apiKeyEnv      the variable that holds its key, where it is not MM_API_KEY
    # fields         optional fields that its requests take; one that is refused is left out from
    #                then on
    # thinking       how it is told to think or not
    # start, get     how it is started, how a model is got
    # streamsCalls   it sends a call's arguments as they are written, not in one piece after a long
    #                silence
    # A page of the server is a path below the base URL, or below the server's root if it begins
    # with "/". Keys lead to a value in it, dots between them; [] is the entry of a list that is for
    # the model in use ("data.[].meta.n_ctx"):
    # window         pages that tell the context it serves, which can be less than the model was
    #                trained for
    # tools          page that tells whether the model's template takes tools; where it does not,
    #                they are ignored without an error
    # For thinking that is sent back (section 6):
    # echo           the field of a message that it is read from
    # insists        the field without which it takes no calls of its own back, asked for or not
    # render         page that shows the prompt that messages become
    # For raw prompts (section 7):
    # limit          how more is asked for than the 16 tokens at which OpenAI's protocol cuts an
    #                answer; {}: it cuts none
    "dmr": {
        "url": "http://localhost:12434/engines/v1",
        "fallback": ["http://host.docker.internal:12434/engines/v1",
                     "http://model-runner.docker.internal/engines/v1"],
        "local": True,
        "fields": LLAMA_FIELDS,
        "thinking": TEMPLATE_SWITCH,
        "start": "docker desktop enable model-runner --tcp {port}",
        "get": "docker model pull {model}",
        "streamsCalls": True,
        "window": [("/engines/_configure?model={model}", "[].Config.context-size"),
                   ("models", "data.[].dmr.context_window")],
        "limit": {},
    },
    "llamacpp": {
        "url": "http://localhost:8080/v1",
        "fallback": ["http://localhost:9931/v1",  # where newer builds listen
                     "http://host.docker.internal:8080/v1", "http://host.docker.internal:9931/v1"],
        "local": True,
        "fields": LLAMA_FIELDS,
        "thinking": TEMPLATE_SWITCH,
        "start": "llama-server -m MODEL.gguf --port {port}",
        "get": "it has the models that --models lists",
        "streamsCalls": True,
        "window": [("models", "data.[].meta.n_ctx"),
                   (LLAMA_PROPS, "default_generation_settings.n_ctx")],
        "tools": (LLAMA_PROPS, "chat_template_caps.supports_tools"),
        "render": "/apply-template",
        "limit": {},
    },
    "ollama": {
        "url": "http://localhost:11434/v1",
        "fallback": ["http://host.docker.internal:11434/v1"],
        "local": True,
        "fields": USAGE,
        "thinking": EFFORT,
        "start": "OLLAMA_HOST=localhost:{port} ollama serve",
        "get": "ollama pull {model}",
        "window": [("/api/ps", "models.[].context_length")],
        "echo": "reasoning",
    },
    "vllm": {
        "url": "http://localhost:8000/v1",
        "fallback": ["http://host.docker.internal:8000/v1"],
        "local": True,
        "fields": USAGE,
        "thinking": BOTH_SWITCHES,
        "start": "vllm serve MODEL --port {port}",
        "get": "it has the model it was started with (--models)",
        "window": [("models", "data.[].max_model_len")],
        "echo": "reasoning",
    },
    "lmstudio": {
        "url": "http://localhost:1234/v1",
        "fallback": ["http://host.docker.internal:1234/v1"],
        "local": True,
        "fields": USAGE,
        "thinking": EFFORT,
        "start": "lms server start --port {port}",
        "get": "lms get {model}",
        "window": [("/api/v1/models", "models.[].loaded_instances.[].config.context_length"),
                   ("/api/v0/models", "data.[].loaded_context_length")],
    },
    "openai": {
        "url": "https://api.openai.com/v1",
        "apiKeyEnv": "OPENAI_API_KEY",
        "fields": USAGE,
        "thinking": EFFORT,
        "streamsCalls": True,
    },
    "deepseek": {
        "url": "https://api.deepseek.com/v1",
        "apiKeyEnv": "DEEPSEEK_API_KEY",
        "fields": USAGE,
        "thinking": {"on": {"thinking": {"type": "enabled"}},
                     "off": {"thinking": {"type": "disabled"}}},
        "streamsCalls": True,
        "insists": "reasoning_content",
    },
    "openrouter": {
        "url": "https://openrouter.ai/api/v1",
        "apiKeyEnv": "OPENROUTER_API_KEY",
        "fields": USAGE,
        "thinking": {"on": {"reasoning": {"enabled": True}},
                     "off": {"reasoning": {"enabled": False}}},
        "window": [("models", "data.[].context_length")],
    },
}
# A server of which only a URL is known: nothing optional is sent, so that the strictest one takes
# the request.
PLAIN = {"window": [("models", "data.[].meta.n_ctx"), ("models", "data.[].max_model_len"),
                    ("models", "data.[].context_length")]}
# the port of a URL tells which server it is, where none is named
PORTS = {12434: "dmr", 8080: "llamacpp", 9931: "llamacpp", 11434: "ollama", 8000: "vllm",
         1234: "lmstudio"}
ENTRY_DEFAULTS = {
    "url": "",
    "fallback": [],
    "local": False,
    "apiKeyEnv": "MM_API_KEY",
    "fields": {},
    "thinking": {},
    "start": "",
    "get": "mm --models lists what it has",
    "streamsCalls": False,
    "window": [],
    "tools": (),
    "echo": "reasoning_content",
    "insists": "",
    "render": "",
    "limit": {"max_tokens": 2048},
    "model": "",
    "sampling": {},
    "thinkTags": False,
    "protocol": "chat",
    "template": "",
}

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
        return requests
    except (ImportError, OSError) as error:  # OSError: in mm.pyz, no place for the certificates
        raise MMError("config", f"mm needs the package requests ({one_line(error, 200)}): "
                      f"{sys.executable} -m pip install requests, or uv run mm.py") from None


def adapter_for(connection):
    """requests' HTTPAdapter, but each socket that urllib3 makes for it is shown to a Connection.

    An adapter has a manager of pools, and one for each proxy; a pool makes urllib3's connections,
    and those make their socket in _new_conn.
    """
    from requests.adapters import HTTPAdapter

    def shown(pool_class):
        class Pool(pool_class):
            def _new_conn(self):
                made = super()._new_conn()
                dial = made._new_conn
                made._new_conn = lambda: connection.hold(dial())
                return made
        return Pool

    def watched(manager):
        pools = manager.pool_classes_by_scheme
        manager.pool_classes_by_scheme = {scheme: shown(pools[scheme]) for scheme in pools}
        return manager

    class Adapter(HTTPAdapter):
        def proxy_manager_for(self, *args, **kwargs):
            return watched(super().proxy_manager_for(*args, **kwargs))

    adapter = Adapter()
    watched(adapter.poolmanager)
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
        path = os.environ.get(name)
        if path and not os.path.exists(path):
            raise MMError("config", f"${name} names {path}, which is not there")
        session.verify = path or session.verify
    proxy = ""
    if not is_near(urlsplit(url).hostname or ""):
        session.proxies = requests.utils.get_environ_proxies(url)
        proxy = requests.utils.select_proxy(url, session.proxies) or ""
    session.adapters["http://"] = session.adapters["https://"] = adapter_for(connection)
    return session, proxy


def is_near(host):
    """Loopback and Docker's own names: never through a proxy."""
    return bool(re.fullmatch(r"(.*\.)?localhost|.*\.docker\.internal|::1|127(\.\d+){1,3}", host))


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
    deadline = time.monotonic() + PROBE_SECONDS + 0.5  # so that a fetch can say why it failed
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
    entries = data.get("data", 0) if status == 200 and isinstance(data, dict) else 0
    if entries is None:  # Ollama without models says data: null
        return []
    if not isinstance(entries, list):
        return None
    entries = [entry for entry in entries if isinstance(dig(entry, "id"), str)]

    def rank(entry):
        # llama.cpp's router tells what is loaded
        is_unloaded = dig(entry, "status.value") == "unloaded"
        return is_unloaded, "embed" in entry["id"].lower()

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
    row of PROVIDERS, `address` its URL in parts.

    plain: it has no such row, as only its URL is known.
    """

    def __init__(self, name, entry, url="", model="", key=""):
        self.name, self.plain, self.model, self.key = name or "server", not name, model, key
        self.entry = {**ENTRY_DEFAULTS, **entry}
        self.url, self.query = base_url(url or self.entry["url"])
        self.address = urlsplit(self.url)

    def endpoint(self, path):
        """The URL of a path below the base URL; below the server's root if it begins with "/"."""
        base = self.url
        if path.startswith("/"):
            base = re.sub(r"(/engines(/llama\.cpp)?)?/v1$", "", base)
        url = f"{base}/{path.lstrip('/')}".replace("{model}", quote(self.model, ""))
        if self.query:
            url += ("&" if "?" in path else "?") + self.query
        return url

    def take_key(self):
        """Takes the key that the server's variable holds. Raises MMError("config")."""
        variable = self.entry["apiKeyEnv"]
        self.key = from_environment(variable)
        odd = re.search("[^!-~]", self.key)
        if odd:
            raise MMError("config", f"${variable}: character {odd.start() + 1} of the key is one "
                          "that an HTTP header cannot carry: copy the key anew")

    def headers(self):
        """Identity, since a compressed stream comes in lumps; a local server gets a dummy key, as
        some insist on one.
        """
        headers = {"Accept-Encoding": "identity", "User-Agent": f"mm/{__version__}"}
        if self.key or self.entry["local"]:
            headers["Authorization"] = f"Bearer {self.key or 'none'}"
        return headers

    def refused_field(self, message):
        """The optional field of a request that a server's message refuses, or ""."""
        switches = self.entry["thinking"].get("off", {})
        for name in [*self.entry["fields"], *switches]:
            if re.search(rf"\b{name}\b", message):
                return name
        if "does not support thinking" in message:
            return next(iter(switches), "")
        return ""

    def redact(self, text):
        """`text` without the key, and without what a URL can hold that is secret, however a server
        echoes them. A dummy key (none, ollama) is no secret, and can stand in any sentence.
        """
        login = self.address.password or self.address.username
        for secret in (self.key, login, self.query):
            if secret and not re.fullmatch("[A-Za-z_-]{1,12}", secret):
                text = text.replace(secret, "***").replace(json.dumps(secret)[1:-1], "***")
        return text

    def advice(self):
        """What the messages of section 2 can say of this server: {place in the message: words}."""
        host, variable = self.address.hostname, self.entry["apiKeyEnv"]
        container = ""
        if in_container() and host in ("localhost", "127.0.0.1", "::1"):
            container = "; inside a container, localhost is the container: " \
                        "the host is host.docker.internal"
        start = self.entry["start"].format(port=self.address.port or 80)
        start = f"start it with `{start}`" if start else "is it running, and is the URL right?"
        return {
            "url": show_url(self.url),
            "host": host,
            "key": f"the key came from ${variable}" if self.key
                   else f"no key was sent: set ${variable}",
            "get": self.entry["get"].format(model=self.model or "MODEL"),
            "start": start + container,
            "container": container,
        }


def in_container():
    return os.path.exists("/.dockerenv") or os.path.exists("/run/.containerenv")


def base_url(text):
    """-> (base URL, query) from whatever form of it a person has. A path of its own is kept as it
    is. Raises MMError("config").

    8080, box:8080, box -> http://box[:8080]/v1 · api.example.com -> https://api.example.com/v1 · a
    slash too many goes, and so does the /chat/completions of a whole endpoint.
    """
    url = re.sub(r"^:?(\d{2,5}(/|$))", r"localhost:\1", text.strip())  # a port alone
    if "://" not in url:
        host = re.match(r"[^/?]*", url).group()
        # a port, a name without a dot, an address: a server on one's own net
        is_local = re.search(r":\d|^[^.]*$|^[\d.]+$", host) or is_near(host)
        url = ("http://" if is_local else "https://") + url
    try:
        if not re.fullmatch(r"(?i)https?://[^\s/]\S*", url):
            raise ValueError
        parts = urlsplit(url)
        parts.port  # raises when it is no port
    except ValueError:
        shown = re.sub(r"//[^/]*@", "//***@", url.partition("?")[0])
        raise MMError("config", f"{one_line(shown, 80)} is not an http(s) URL") from None
    path = re.sub(r"/+", "/", parts.path)
    path = re.sub(r"(/chat/completions|/completions|/models)?/?$", "", path, count=1)
    return f"{parts.scheme}://{parts.netloc}{path or '/v1'}", parts.query


# -- which server is used, and which model

def provider_table(settings):
    """PROVIDERS with the config's own entries and overrides, each entry with all its columns.
    Raises MMError("config").
    """
    table = dict(PROVIDERS)
    for name, own in settings["providers"].items():
        where = f"{settings.source('providers')}.{name}"
        if "like" in own:
            check_name(own["like"], PROVIDERS, "provider", f"{where}.like")
        entry = PROVIDERS.get(own.get("like", name), PLAIN)
        if "url" in own:
            entry = {**entry, "fallback": []}  # another machine's fallback is no fallback
        table[name] = {**entry, **own}
        if "url" not in table[name]:
            raise MMError("config", f"{where}: wants a url, or `like: NAME`")
    return {name: {**ENTRY_DEFAULTS, **entry} for name, entry in table.items()}


def check_name(name, known, kind, source):
    """Raises MMError("config") for a name that is none of the known ones."""
    if name not in known:
        raise MMError("config", f"{source}: no {kind} is called {one_line(name, 40)}"
                      f"{did_you_mean(name, known)}: {', '.join(known)}")


def candidates(settings, say):
    """-> [Backend]: the servers that may be meant, the best one first. No server is asked.

    A provider or a URL that is named is one server, tried at its fallback URLs too. Else it is any
    local server, the hosts of containers last. say: hears what a person should know. Raises
    MMError("config").
    """
    table = provider_table(settings)
    name, url = settings["provider"], settings["url"]
    if name:
        check_name(name, table, "provider", settings.source("provider"))
        is_for_another = settings.source("provider") != "$MM_PROVIDER"
        if is_for_another and settings.source("url") == "$MM_BASE_URL":
            # or the provider's key, and a conversation held with it, would go there
            say(f"{settings.source('provider')} {name} puts $MM_BASE_URL aside")
            url = ""
        return at_its_urls(name, table[name], url)
    if url:
        # of mm's own alone: a key that the config names for another must not follow its port to
        # any host
        name = PORTS.get(urlsplit(base_url(url)[0]).port, "")
        return at_its_urls(name, PROVIDERS.get(name, PLAIN), url)
    servers = []
    for name, entry in table.items():
        if entry["local"]:
            servers += at_its_urls(name, entry)
    return sorted(servers, key=lambda server: ".docker.internal" in server.url)


def at_its_urls(name, entry, url=""):
    """[Backend] at a URL that is named, else at each of an entry."""
    urls = [url] if url else [entry["url"], *entry["fallback"]]
    return [Backend(name, entry, one) for one in urls]


def resolve(settings, servers, say, needs_model=True):
    """-> the Backend that is used, of candidates(), with its key and its model.

    say: hears which server and model are used where none was named. Raises MMError: config, or what
    the search for a server or a model ended with.
    """
    is_named = settings["provider"] or settings["url"]
    backend, ids = servers[0], None
    if len(servers) > 1 or not is_named:
        backend, ids = answering(servers, is_named)
    if backend is not servers[0] or not is_named:
        say(f"using {backend.name} at {show_url(backend.url)}")
    backend.take_key()  # a key goes to none of them before one is chosen
    mm_own = PROVIDERS.get(backend.name, ENTRY_DEFAULTS)
    is_hosted = not backend.entry["local"] and backend.url == mm_own["url"]
    if is_hosted and needs_model and not backend.key:
        raise MMError("config", f"{backend.name} wants a key: set ${backend.entry['apiKeyEnv']}")
    backend.model = settings["model"] or backend.entry["model"]
    if needs_model and not backend.model:
        backend.model = first_model(backend, ids)
        say(f"using the model {backend.model}")
    return backend


def answering(servers, is_named):
    """-> (the first of the servers that answers, its model ids, None if not told).

    Of servers that nobody named, it is the first that lists a model, else one that wants a key.
    """
    def accept(status, data):
        return status > 0 if is_named else bool(model_ids(status, data))

    asked = [(server, "models") for server in servers]
    found = first_good(asked, accept)
    if not found and not is_named:
        found = first_good(asked, lambda status, data: status in (401, 403))
    if found:
        index, status, data = found
        return servers[index], model_ids(status, data)
    if is_named:
        return servers[0], None
    tried = dict.fromkeys(f"{server.name} :{server.address.port or 80}" for server in servers)
    where = "on the host of this container" if in_container() else "here"
    raise MMError("unreachable", f"no model server answers ({', '.join(tried)}): start one "
                  f"{where}, or name one with --url or -p; mm --demo needs none")


def takes_first_model(backend):
    """Whether neither a model nor a key need be named: the user's own server, not a hosted one."""
    return backend.entry["local"] or backend.plain


def first_model(backend, ids):
    """The model to use where none is named. ids: those of the server's list, None if not asked."""
    if not takes_first_model(backend):
        raise MMError("config", "no model is named: say -m MODEL "
                                f"(mm --models lists those of {backend.name})")
    ids = ids or ask_models(backend)[0]
    if not ids:
        raise MMError("not_found", f"{backend.name} at {show_url(backend.url)} has no model: "
                      + backend.advice()["get"])
    return ids[0]


def ask_models(backend):
    """-> (the model ids that a server lists, the page with the list). Raises MMError where it gives
    none.
    """
    where = show_url(backend.endpoint("models"))
    found = first_good([(backend, "models")], lambda status, data: True)
    if not found:
        raise MMError("unreachable", f"{where} took the connection and gave no model list within "
                      f"{PROBE_SECONDS:g} s: is it busy? (-m MODEL needs none)")
    _, status, data = found
    if not status:
        raise data
    ids = model_ids(status, data)
    if ids is None:
        kind, advice = "not_found", "is the URL right (most end in /v1)?"
        if status in (401, 403):
            kind, advice = "auth", backend.advice()["key"]
        raise MMError(kind, f"{where} gives no model list (HTTP {status}): {advice}")
    return ids, data


# -- what a server says of itself

def dig(data, path, model=""):
    """What stands at a dotted path in JSON, or None. [] is the list's entry for `model`, or its
    only one.
    """
    try:
        for key in path.split("."):
            data = entry_for(data, model) if key == "[]" else data[key]
        return data
    except (TypeError, KeyError, AttributeError):  # the page is none of that kind
        return None


def entry_for(entries, model):
    if len(entries) == 1:
        return entries[0]
    for entry in entries:
        names = [str(entry.get(key)) for key in ("id", "model", "name", "key", "Model")]
        if any(same_model(name, model) for name in names):
            return entry
    return None


def unknown_model(backend, ids):
    """What to say of a model that is not in a server's list, or ""."""
    name = backend.model
    if not name or not ids or any(same_model(one, name) for one in ids):
        return ""
    return f"{name} is not among the server's models{did_you_mean(name, ids)}"


def fetch_page(backend, path, *body):
    """The JSON of an answer with status 200, or None. body: JSON to post, if any."""
    found = first_good([(backend, path, *body)], lambda status, data: status == 200)
    return found and found[2]


def probe(backend):
    """What a server says of itself, for advice.

    models: [ids] or None; fault: an MMError where there are none; window: the context it serves in
    tokens, or 0; tools: whether the model's template takes tools, or None where that is not told.
    """
    answer = {"models": None, "fault": None, "window": 0, "tools": None}
    pages = {}
    try:
        answer["models"], pages["models"] = ask_models(backend)
    except MMError as error:
        answer["fault"] = error
        return answer

    def read(path, keys):
        if path not in pages:
            pages[path] = fetch_page(backend, path)
        return dig(pages[path], keys, backend.model)

    for path, keys in backend.entry["window"]:
        answer["window"] = answer["window"] or as_int(read(path, keys))
    if backend.entry["tools"]:
        answer["tools"] = read(*backend.entry["tools"])
    return answer


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

# the most bytes of a line, an event, a body or all calls of an answer: no server needs as many
MAX_LINE = 8 << 20
CALL_BYTES = 1 << 10  # what an empty call counts as


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
    is_stream = False
    name, lines, size = "", [], 0  # lines: of an event, or of a body that may be no stream
    for line in rows:
        if not is_stream and line.startswith(b"\xef\xbb\xbf"):
            line = line[3:]
        field, _, value = line.partition(b":")
        if value[:1] == b" ":
            value = value[1:]
        if not is_stream and field in (b"data", b"event", b"error"):
            if lines and lines[0].lstrip()[:1] in (b"{", b"["):  # JSON, and then [DONE] as an event
                yield "body", [b"\n".join(lines)], True
            is_stream, lines = True, []
        if not is_stream:
            if lines or field not in (b"", b"id", b"retry"):
                lines.append(line)
        elif not line:
            if lines or name:
                yield name, lines, False
            name, lines = "", []
        elif field == b"data":
            lines.append(value)
        elif field == b"event":
            name = value.decode("utf-8", "replace").strip()
        elif field == b"error":  # older llama.cpp: an error as a field of its own
            yield "error", [value], False
        elif field[:1] == b"{":  # a proxy's error, written into the stream as it is
            yield name, [line], False
        # else a comment (no name before the colon), or a field that says nothing of the answer
        size += len(line) + 100  # what an empty one takes in memory, and more
        if not lines:
            size = 0
        elif size > MAX_LINE:
            raise MMError("protocol", "the server sent an event, or a body, of more than "
                                      f"{MAX_LINE >> 20} MiB")
    if is_stream and (lines or name):
        yield name, lines, True
    elif lines:
        yield "body", [b"\n".join(lines)], True


# -- from events to deltas

DONE = object()  # stands for [DONE], or what other servers write for it, among an event's values
END_MARKS = re.compile(rb'(?i)"?(\[(done|end)\]|done|end)"?')
SUCCESS = re.compile(r"(?i)(none|null|false|\[\]|ok|success|0+|200+)?")
# finish_reasons by which a server says that it has failed (vLLM, Z.ai, DeepSeek, …)
GIVEN_UP = (r"(?i)error|abort|fail|insufficient|unavailable|overload|time.?out|cancel"
            r"|network|lost|exception|interrupt|terminated|preempt")


def deltas(rows, backend, url):
    """Deltas (kind, value) of a response's lines, each as soon as its line is there. Raises
    MMError.

        reasoning, answer   text
        call                a fragment of a tool call: {"index", "id", "name", "arguments", "extra"}
        progress            (processed, total): prompt tokens beyond the cached ones
        finish              the finish_reason, or "" for [DONE]
        usage, timings      a dict, as the server gives it
        model, id           text
        extra               fields that only this server knows
        media               what a part is that is no text: "image" or "audio"

    After [DONE] it ends, without waiting for the connection to close.
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
    """Reads the chunks of one stream, each in the light of the chunks before it."""

    def __init__(self):
        self.is_empty = True
        self.is_complete = False  # a finish_reason has come, or a whole message
        self.has_deltas = False
        self.halves = {}  # see without_halves
        self.sent = set()  # the keys whose value is known already
        self.with_calls = []  # indexes of further choices that hold a call: their end counts, too

    def read(self, name, chunk, backend, url):
        """The deltas of a chunk. Raises MMError for one that is an error."""
        choices = dicts_in(chunk.get("choices"))
        for choice in choices:
            if choice.get("error") and is_failure(choice["error"]):
                raise explain(0, choice["error"], backend, url)
        if is_error(name, chunk):
            raise explain(0, chunk, backend, url)
        for choice in choices:
            # before its text: text behind a finish_reason tells the watchdog that more may come
            if is_first(choice):
                yield from self.read_finish(choice)
            # all of an answer: of a server that does not stream, or once more behind its deltas
            if choice.get("message"):
                self.is_complete = True
                if self.has_deltas and not choice.get("delta"):
                    continue
            for kind, value in read_choice(choice):
                if kind in ("reasoning", "answer"):
                    value = without_halves(value, kind, self.halves)
                elif kind == "call" and not is_first(choice):
                    self.with_calls.append(choice["index"])
                if value:
                    yield kind, value
            self.has_deltas = self.has_deltas or bool(choice.get("delta"))
            if choice.get("index") in self.with_calls:
                yield from self.read_finish(choice)
        yield from self.read_rest(chunk)

    def read_rest(self, chunk):
        """What a chunk tells beside its choices."""
        progress = as_dict(chunk.get("prompt_progress"))
        if progress:
            cached = as_int(progress.get("cache"))
            processed, total = as_int(progress.get("processed")), as_int(progress.get("total"))
            yield "progress", (processed - cached, total - cached)
        for key in ("model", "id"):  # in every chunk, and always the same
            if key not in self.sent and isinstance(chunk.get(key), str):
                self.sent.add(key)
                yield key, chunk[key]
        for key in ("usage", "timings"):
            if as_dict(chunk.get(key)):
                yield key, chunk[key]

    def read_finish(self, choice):
        """The end of a choice. Raises MMError for one that says that the server has failed."""
        finish = choice.get("finish_reason")
        # an empty one means that there is none, as some write it
        if not isinstance(finish, str) or finish in ("", "null"):
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
    if name == "error" or "error" in (value.get("type"), value.get("object")):
        return True
    base = as_dict(value.get("base_resp"))
    if is_failure(value.get("error")) or is_failure(base.get("status_code")):
        return True
    if value.get("choices") or value.get("success") is True:
        return False
    if value.get("success") is False or value.get("detail"):
        return True
    return is_failure(value.get("code")) and ("message" in value or "msg" in value)


def is_failure(value):
    """Whether an error or a code says more than that all is well, as some say in each chunk."""
    if isinstance(value, dict):
        return any(map(is_failure, value.values()))
    return value is not None and not SUCCESS.fullmatch(str(value))


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
    extra = {key: delta[key] for key in ("reasoning_details", "extra_content") if delta.get(key)}
    if extra:
        yield "extra", extra
    kinds = [str(part.get("type")) for part in dicts_in(content)]
    for kind in ("image", "audio"):
        if delta.get(kind) or delta.get(f"{kind}s") or any(kind in name for name in kinds):
            yield "media", kind


def read_calls(delta, choice=""):
    """The fragments of tool calls in a delta. choice: what tells their indexes from those of the
    first choice.
    """
    calls = dicts_in(delta.get("tool_calls"))
    if delta.get("function_call"):  # the form before there were several
        calls.append({"function": delta["function_call"]})
    for call in calls:
        function = as_dict(call.get("function"))
        index, call_id, name = call.get("index"), call.get("id"), function.get("name")
        arguments = function.get("arguments") or ""
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments)
        fragment = {"index": f"{choice}{index}" if isinstance(index, int) else None,
                    "id": call_id if isinstance(call_id, str) else "",
                    "name": name if isinstance(name, str) else "",
                    "arguments": arguments,
                    "extra": {key: value for key, value in call.items()
                              if key not in ("index", "id", "type", "function") and value}}
        # else it is no call, and no sign of life
        if fragment["id"] or fragment["name"] or arguments:
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

    A fragment begins a call only if it says something that the call before it cannot be: servers
    give all parallel calls index 0, count the index up within a call, leave ids out, repeat them,
    or repeat the name.
    """

    def __init__(self):
        self.calls, self.by_index, self.size = [], {}, 0

    def add(self, fragment):
        call = self.continued(fragment)
        if call is None:
            call = {"id": "", "name": "", "arguments": [], "extra": {}}
            self.calls.append(call)
            self.size += CALL_BYTES
        if fragment["index"] is not None:
            self.by_index[fragment["index"]] = call
        call["id"] = call["id"] or fragment["id"]
        call["name"] = call["name"] or fragment["name"]
        call["extra"].update(fragment["extra"])
        if fragment["arguments"]:
            call["arguments"].append(fragment["arguments"])
            self.size += len(fragment["arguments"])
        if self.size > MAX_LINE:
            raise MMError("protocol", f"the tool calls of one answer passed {MAX_LINE >> 20} MiB")

    def continued(self, fragment):
        """The open call that a fragment belongs to, or None if it begins one."""
        index, call_id, name = fragment["index"], fragment["id"], fragment["name"]
        call = self.by_index.get(index) or (self.calls[-1] if self.calls else None)
        if index is None and call_id:
            call = next((each for each in self.calls if each["id"] == call_id), call)
        # arguments alone: the usual fragment; the index of some counts up within a call
        if call is None or not (call_id or name):
            return call
        is_new_index = index is not None and index not in self.by_index
        has_id = call_id and call["id"]
        if has_id and call_id != call["id"]:  # another call, also where all have index 0
            return None
        # without ids, the name tells where a call begins
        if not has_id and name and call["name"] and name != call["name"]:
            return None
        # the same id or name once more: in each fragment of a call, or for each call
        begins = fragment["arguments"].lstrip()[:1] in ("", "{", '"')  # of a JSON object
        is_repeated = is_new_index if has_id else name and call["name"]
        if is_repeated and begins and self.is_complete(call):
            return None
        # else an id or a name that comes late
        return None if is_new_index and not has_id and call["name"] else call

    @staticmethod
    def is_complete(call):
        """Whether a call's arguments are a complete JSON object. What cannot be the end of one is
        not parsed: some servers repeat the name in every fragment.
        """
        arguments = call["arguments"]
        may_be = arguments and arguments[-1].rstrip()[-1:] in ("", "}", '"')
        return bool(may_be) and parse_arguments("".join(arguments)) is not None

    def finished(self):
        """[{"id", "name", "arguments" (a dict, or None if they are no complete JSON object),
        "raw", "extra"}, …], ids unique.
        """
        done = {}
        for number, call in enumerate(self.calls):
            raw = clean("".join(call["arguments"]))
            call_id = clean(call["id"])
            while not call_id or call_id in done:
                call_id = f"call{number:05d}"  # nine characters: Mistral insists
                number += 1
            done[call_id] = {"id": call_id, "name": clean(call["name"]), "raw": raw,
                             "arguments": parse_arguments(raw), "extra": call["extra"]}
        return list(done.values())


def parse_arguments(raw):
    """A call's arguments as a dict; {} for none at all; None if they are not one complete JSON
    object.
    """
    try:
        value = read_json(raw) if raw.strip() else {}
        if isinstance(value, str):  # encoded twice
            value = read_json(value)
        value = cleaned(value)  # what is too deep to be sent back is no call
    except (ValueError, RecursionError):
        return None
    if value is None:
        return {}
    return value if isinstance(value, dict) else None


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

    open_stream      is called in the reader thread with this call's Connection; returns an iterator
                     of deltas, or raises MMError
    watchdog         the longest silence between two tokens, in seconds; 0 is no limit
    first_token      the same before the first token
    waits_for_call   whether a call may come in one piece, after the silence in which it is written

    Iterating gives the deltas, and ("waiting", seconds since the last sign of life) where no delta
    is there: at once with 0.0, so that a view can flush what it has, and then each second. stop()
    makes the iteration raise MMError("cancelled").

    The queue is a SimpleQueue, as its put() is safe in a signal handler: so are stop() and wake().
    """

    def __init__(self, open_stream, watchdog, first_token, waits_for_call=False):
        self.open_stream = open_stream
        # the longer limit serves for both where a call is written in silence
        self.waits_for_call = waits_for_call and not 0 < first_token <= watchdog
        if self.waits_for_call:
            watchdog = first_token
        self.limits = {"first": first_token, "next": watchdog, "last": GRACE_SECONDS}
        self.box = queue.SimpleQueue()
        self.connection = Connection()
        self.stopped = False

    def stop(self):
        self.stopped = True
        self.wake()

    def wake(self):
        """Makes the iteration give a `waiting` now, so that its caller can act."""
        self.box.put(("waiting", 0.0))

    def say(self, message):
        """Puts a notice among the deltas."""
        self.box.put(("notice", message))

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
            ended = MMError("protocol", f"mm could not read the stream: {one_line(repr(error), 200)}")
        self.box.put(("end", ended))

    def __iter__(self):
        threading.Thread(target=self.read, daemon=True).start()
        phase, has_answer, has_finished = "first", False, False
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
                    has_answer = has_answer or kind != "reasoning"
                    silent, phase = 0.0, "next"
                elif kind == "progress":
                    silent = 0.0
                elif kind == "finish":
                    silent, has_finished = 0.0, True
                    if has_answer:  # else one in the first chunk, or in each
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


def to_messages(history, system):
    """The messages to send for a history of {"role", "content", "tool_calls", "tool_call_id"}.

    A message and a call can have more that goes out with them: see Echo.outgoing().
    """
    turns = []  # (message, {call id: the result behind it})
    for message in history:
        if message["role"] != "tool":
            turns.append((message, {}))
        elif turns:
            turns[-1][1].setdefault(message["tool_call_id"], message["content"])
    out = [{"role": "system", "content": system}] if system.strip() else []
    for message, results in turns:
        role = message["role"]
        content = message["content"]
        calls = message.get("tool_calls", [])
        if not content.strip() and not calls:
            continue
        last = out[-1]["role"] if out else "system"
        # templates that insist on turns do not count calls and results
        if role == "user" and last == "tool":
            out.append({"role": "assistant", "content": NO_ANSWER})
        elif role == "assistant" and last == "system":
            out.append({"role": "user", "content": NO_QUESTION})
        elif role == last:
            # the first one's thinking is left out: it is not what led to the second
            content = f"{out.pop()['content']}\n\n{content}".rstrip()
        sent = {"role": role, "content": content, **message.get("fields", {})}
        out.append(sent)
        if calls:
            sent["tool_calls"] = [sent_call(call) for call in calls]
        for call in calls:  # a result without its call would be refused, and so would the reverse
            result = results.get(call["id"], NO_RESULT)
            out.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return out


def sent_call(call):
    """A call as a request holds it; `extra`: what its server added to it."""
    # what a model made up as a name can hold what no server takes back (Anthropic, OpenAI)
    name = re.sub(r"[^A-Za-z0-9_-]", "_", call["name"])[:64] or "unnamed"
    arguments = json.dumps(call["arguments"] or {}, ensure_ascii=False)
    function = {"name": name, "arguments": arguments}
    return {"id": call["id"], "type": "function", "function": function, **call.get("extra", {})}


def merged(base, extra):
    """`base` with `extra` laid over it, map by map."""
    out = dict(base)
    for key, value in extra.items():
        if isinstance(value, dict) and isinstance(out.get(key), dict):
            value = merged(out[key], value)
        out[key] = value
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
    """What thinking of a history the template renders: "all", "latest" (after the last question)
    or "none"; "all" where the server does not tell.

    It is asked to render a history with two thoughts. Of the 67 templates in llama-server 11434, 20
    render both, 14 the one that follows the last question, the others none. tools: as they are
    offered, since some templates keep thinking in a tool loop only; without any, nothing follows
    the last question.
    """
    field = backend.entry["echo"]
    messages = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2", field: EARLIER},
        {"role": "user", "content": "3"},
    ]
    body = {"model": backend.model, "messages": messages}
    if tools:
        call = {"id": "call00000", "name": tools[0]["function"]["name"], "arguments": {}}
        messages += [
            {"role": "assistant", "content": "", field: LATEST, "tool_calls": [sent_call(call)]},
            {"role": "tool", "tool_call_id": "call00000", "content": "4"},
        ]
        body["tools"] = tools
    page = backend.entry["render"] and fetch_page(backend, backend.entry["render"], body)
    prompt = dig(page, "prompt", "")
    if not isinstance(prompt, str) or EARLIER in prompt:
        return "all"
    return "latest" if LATEST in prompt else "none"


def refuses_thoughts(error):
    """Whether a refusal is about the thinking in a history; `Failed to parse input` is about what
    the model said.
    """
    if error.kind not in ("server", "not_found") or "Failed to parse input" in error.message:
        return False
    words = r"(?i)template|jinja|reasoning|thinking|thought"
    return re.search(words, error.message) is not None


class Echo:
    """What a server gets back of its own with a history: thinking, the ids of its calls, and what
    it added that mm does not know (Gemini's signatures, OpenRouter's reasoning_details).

    A message's "origin" holds it: {"maker", "text" of the thinking and its "tokens", "fields",
    "calls": {id: extra fields}}. It stays in memory, and goes to the model that made it alone.
    """

    def __init__(self, backend, on):
        self.backend = backend
        self.on = on and backend.entry["local"]
        self.insists = backend.entry["insists"]  # field without which it takes no calls back, or ""
        self.ids = set()       # of the calls that it made
        self.served = {}       # model: what its server calls it
        self.rendered = {}     # (model, whether tools are offered): thoughts_rendered()
        self.refusing = set()  # models whose template refused thinking

    def maker(self):
        model = self.backend.model
        return model, self.served.get(model)

    def label(self, reply, calls):
        """{"origin": …} for the message of a complete Reply, or {}; `extra` leaves the calls for
        it. Notes what the server calls the model, and its calls.
        """
        self.served[self.backend.model] = reply.model
        self.ids.update(call["id"] for call in calls)
        extras = {call["id"]: call.pop("extra") for call in calls}
        text = reply.thought.getvalue()
        if not text.strip() or not (self.on or calls):
            text = ""
        if not (text or reply.extra or any(extras.values())):
            return {}
        tokens = max(1, reply.produced_tokens()[0])
        return {"origin": {"maker": self.maker(), "text": text, "tokens": tokens,
                           "fields": reply.extra, "calls": extras}}

    def outgoing(self, history, tools):
        """-> (the history for to_messages(), with what goes back in it; tokens of the thinking)."""
        out = []
        tokens = 0
        for index, message in enumerate(history):
            calls = message.get("tool_calls", [])
            origin = message.get("origin", {})
            if origin.get("maker") != self.maker():
                origin = {}
            fields = dict(origin.get("fields", {}))
            extras = origin.get("calls", {})
            insisted = self.insists if calls else ""
            if origin.get("text") and (insisted or self.goes_back(index, history, tools)):
                fields[insisted or self.backend.entry["echo"]] = origin["text"]
                tokens += origin["tokens"]
            elif insisted:  # not known any more, or another's: an empty text would be refused
                fields[insisted] = " "
            sent = {**message, "fields": fields}
            if calls:
                sent["tool_calls"] = [{**call, "id": self.sent_id(call["id"]),
                                       "extra": extras.get(call["id"], {})} for call in calls]
            if message["role"] == "tool":
                sent["tool_call_id"] = self.sent_id(message["tool_call_id"])
            out.append(sent)
        return out, tokens

    def forget(self, history, is_refused):
        """Takes the thinking out of a history; a model whose template refused it gets no more."""
        for message in history:
            message.get("origin", {})["text"] = ""
        if is_refused:
            self.refusing.add(self.backend.model)

    def sent_id(self, call_id):
        """The id of a call for this server. One that it did not make becomes nine letters and
        digits, as Mistral insists; Bedrock takes no dots or colons.
        """
        import zlib
        if call_id in self.ids or re.fullmatch("[A-Za-z0-9]{9}", call_id):
            return call_id
        return f"c{zlib.crc32(call_id.encode()):08x}"

    def goes_back(self, index, history, tools):
        """Whether the thinking of that message goes back as reasoningEcho wants it.

        The server is asked what its template renders, once there is something to send.
        """
        model = self.backend.model
        if not self.on or model in self.refusing:
            return False
        about = model, bool(tools)
        if about not in self.rendered:
            self.rendered[about] = thoughts_rendered(self.backend, tools)
        if self.rendered[about] == "latest":
            return all(message["role"] != "user" for message in history[index:])
        return self.rendered[about] == "all"


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

    def __init__(self, opened):
        self.opened = opened
        self.state = "start"  # then "thinking"; "gap" is the white space behind the block; "answer"
        self.rest = ""        # what could still become a tag

    def feed(self, text):
        """Yields ("reasoning" or "answer", text) of what is settled; a part of a tag is kept."""
        text = self.rest + text
        self.rest = ""
        if self.state == "start":
            text = self.begin(text)
        if self.state == "thinking":
            thought, tag, text = text.partition(THINK_END)
            if tag:
                self.state = "gap"
            else:
                thought = self.without_part_of_tag(thought)
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
        if any(tag.startswith(start) and tag != start for tag in (THINK, THINK_END)):
            self.rest = text
            return ""
        # a closing tag alone is left behind by a server that parts the thinking itself
        is_thinking = self.opened or start.startswith((THINK, THINK_END))
        self.state = "thinking" if is_thinking else "answer"
        return start.removeprefix(THINK) if is_thinking else text

    def without_part_of_tag(self, text):
        """`text` without an end that could begin a closing tag: that waits for the next piece."""
        cut = text.rfind("<")
        if cut >= 0 and THINK_END.startswith(text[cut:]):
            text, self.rest = text[:cut], text[cut:]
        return text

    def end(self):
        """Yields what is left. Whatever comes later is answer."""
        is_thinking = self.state == "thinking" or (self.state == "start" and self.opened)
        if self.rest:
            yield ("reasoning" if is_thinking else "answer"), self.rest
        self.state = "answer"
        self.rest = ""


def split_thinking(incoming, tags):
    """Deltas with their answer parted by ThinkTags. Raises what `incoming` raises."""
    ended = None
    try:
        for kind, value in incoming:
            if kind == "answer":
                yield from tags.feed(value)
                continue
            if kind == "reasoning":  # the server parts it itself
                tags.opened = False
            elif kind == "call":
                yield from tags.end()
            yield kind, value
    except MMError as error:
        ended = error
    yield from tags.end()
    if ended:
        raise ended


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
    for name, unit in (("retry-after-ms", 0.001), ("Retry-After", 1.0)):
        value = headers.get(name, "").strip()
        if re.fullmatch(r"\d{1,9}(\.\d{1,9})?", value):
            return float(value) * unit
    try:
        from email.utils import parsedate_to_datetime
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None


class Protocol:
    """How a request is posted and its stream read. A protocol adds these:

    path                where, below the base URL
    applies_template    whether the server makes the prompt: then it takes tools
    fields(history, system, tools, think)    a request's body, before any options
    tags(think)         the ThinkTags of an answer, or None where the server parts the thinking
    """

    def __init__(self, backend):
        self.backend = backend

    def body(self, history, system, tools, sampling, think, refused):
        """The request body as a dict.

        tools: as Toolbox.schemas() gives them; think: True, False or None (as the server likes);
        sampling: fields that go out as they are; refused: optional fields that are left out.
        """
        body = self.fields(history, system, tools, think)
        for field in refused:
            body.pop(field, None)
        body = merged(body, sampling)
        if body["stream"] is not True:  # -o stream=false
            body.pop("stream_options", None)  # vLLM refuses it then
        return body

    def stream(self, body, connection, tap, notice):
        """Posts bytes; -> an iterator of deltas. Raises MMError.

        tap: an open file or None; notice: called with what goes wrong there.
        """
        url = self.backend.endpoint(self.path)
        answered = False
        session, proxy = open_session(connection, url)
        from http.client import HTTPException
        from urllib3.exceptions import HTTPError  # not before open_session() has found requests
        headers = {**self.backend.headers(), "Content-Type": "application/json",
                   "Accept": "text/event-stream"}
        seconds = (CONNECT_SECONDS, None)  # silence is the watchdog's
        try:
            with session, session.post(url, data=body, headers=headers, stream=True,
                                       allow_redirects=False, timeout=seconds) as response:
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

    def end_thinking(self, stream_id):
        """Tells llama.cpp to end the thinking of that stream; -> whether it will.

        Called in the main thread, while the stream is read in its own.
        """
        order = {"id": stream_id, "action": "reasoning_end"}
        answer = fetch_page(self.backend, "chat/completions/control", order)
        return dig(answer, "success", "") is True

    def refusal(self, response, url, proxy, connection):
        """MMError for an answer that is none: a redirect, or a status of 400 and more.

        requests would follow a redirect with a GET, and to any host, with the key.
        """
        status = response.status_code
        shown = show_url(url)
        if status < 400:
            target = show_url(urljoin(url, response.headers.get("Location", "")))
            return MMError("not_found", f"{shown} has moved to {target} (HTTP {status}): "
                                        "use that as the URL")
        timer = threading.Timer(PROBE_SECONDS, connection.hang_up)
        timer.start()  # an error whose text never ends is still an error
        body = beginning(response, MAX_WORDS)
        timer.cancel()
        error = explain(status, body, self.backend, shown, retry_after(response.headers))
        if proxy and status in (407, 502, 503, 504):
            advice = f"it was asked through the proxy {show_url(proxy)}"
            error.message = compose(error.message, "", advice)
        return error


class ChatCompletions(Protocol):
    """POST /chat/completions: messages, which the server makes a prompt of. Thinking comes in a
    field of its own.
    """

    path = "chat/completions"
    applies_template = True

    def fields(self, history, system, tools, think):
        entry = self.backend.entry
        switch = {True: "on", False: "off"}.get(think)
        body = {"model": self.backend.model, "messages": to_messages(history, system),
                "stream": True, **entry["fields"]}
        if tools:
            body["tools"] = tools
        return merged(body, entry["thinking"].get(switch, {}))

    def tags(self, think):
        setting = self.backend.entry["thinkTags"]
        if not setting:
            return None
        return ThinkTags(think is True or (setting == "open" and think is None))


# -- raw prompts

# Format: for each role, what stands before and after its text, the {}. What stands before the
# assistant's begins the model's turn, and what stands after it ends one. A template in Jinja is of
# that format if it has the text `known_by`, and not `but_not` (of Phi-4, Llama 4, Gemma 4 and
# Llama 2).
TEMPLATES = {
    "chatml": {
        "system": "<|im_start|>system\n{}<|im_end|>\n",
        "user": "<|im_start|>user\n{}<|im_end|>\n",
        "assistant": "<|im_start|>assistant\n{}<|im_end|>\n",
        "known_by": "<|im_start|>", "but_not": "<|im_sep|>",
    },
    "llama3": {
        "system": "<|start_header_id|>system<|end_header_id|>\n\n{}<|eot_id|>",
        "user": "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>",
        "assistant": "<|start_header_id|>assistant<|end_header_id|>\n\n{}<|eot_id|>",
        "known_by": "<|start_header_id|>", "but_not": "<|header_start|>",
    },
    # these two have no system role: its text stands before the first question
    "gemma": {
        "user": "<start_of_turn>user\n{}<end_of_turn>\n",
        "assistant": "<start_of_turn>model\n{}<end_of_turn>\n",
        "known_by": "<start_of_turn>", "but_not": "<|turn>",
    },
    "mistral": {
        "user": "[INST]{}[/INST]",
        "assistant": "{}</s>",
        "known_by": "[INST]", "but_not": "<<SYS>>",
    },
}


# as Qwen's template writes them
THINK_OPENED, THINK_CLOSED = f"{THINK}\n", f"{THINK}\n\n{THINK_END}\n\n"


def as_prompt(messages, template):
    """The prompt that a format of TEMPLATES makes of messages, without the token that begins a
    text: the server puts that. No format knows tools: a call and its result become text.
    """
    prompt = system = ""
    for message in messages:
        role = message["role"]
        text = message["content"]
        for call in message.get("tool_calls", []):
            function = call["function"]
            text = f"{text}\n[called {function['name']} {function['arguments']}]".lstrip()
        if role == "tool":
            role = "user"
            text = f"[its result]\n{text}"
        if role not in template:  # no system role: its text goes before the first question
            system = f"{text}\n\n"
            continue
        prompt += template[role].replace("{}", system + text)
        system = ""
    return prompt + template["assistant"].partition("{}")[0]


class RawCompletions(Protocol):
    """POST /completions: a prompt that mm makes, for servers that apply no template. Thinking comes
    as text in <think> tags.

    A block that the prompt opens is thinking up to its closing tag; one that it opens and closes
    again leaves nothing but answer.
    """

    path = "completions"
    applies_template = False

    def opens(self, think):
        """Whether the prompt opens the thinking block (True), opens and closes it (False), or
        neither (None).
        """
        return True if think is None and self.backend.entry["thinkTags"] else think

    def fields(self, history, system, tools, think):
        entry = self.backend.entry
        template = TEMPLATES[entry["template"] or "chatml"]
        prompt = as_prompt(to_messages(history, system), template)
        prompt += {True: THINK_OPENED, False: THINK_CLOSED, None: ""}[self.opens(think)]
        stop = template["assistant"].partition("{}")[2].strip()
        body = {"model": self.backend.model, "prompt": prompt, "stream": True, "stop": [stop],
                **entry["limit"], **entry["fields"]}
        body.pop("reasoning_control", None)  # the thinking block is not the server's
        return body

    def tags(self, think):
        opens = self.opens(think)
        return None if opens is False else ThinkTags(opens is True)


PROTOCOLS = {"chat": ChatCompletions, "completions": RawCompletions}


# -- the template in a model file

TEMPLATE_KEY = b"tokenizer.chat_template\x08\0\0\0"  # the key, and the type: a text


def template_of(path):
    """-> (chat template of a GGUF file, its name in TEMPLATES or "").

    It is looked for by its key, at the head of the file. Raises MMError("config") for a file that
    cannot be read, or has no template.
    https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
    """
    if os.path.exists(path) and not os.path.isfile(path):  # opening a pipe would wait
        raise MMError("config", f"{path}: this is no regular file")
    try:
        with open(path, "rb") as file:
            raw = file.read(MOST_TEXT)
    except OSError as error:
        raise MMError("config", f"{path}: {error.strerror}") from None
    found = raw.partition(TEMPLATE_KEY)[2]  # the template's length in bytes, and the template
    size = int.from_bytes(found[:8], "little")
    template = found[8:8 + size].decode("utf-8", "replace")
    if not template:
        raise MMError("config", f"{path}: no chat template is at its head: is it a GGUF file "
                                "(little-endian), and of a split model the first file?")
    for name, form in TEMPLATES.items():
        if form["known_by"] in template and form["but_not"] not in template:
            return template, name
    return template, ""


# ==================================================================================================
# 8. Tools
#
# What a model may call: four tools of mm's own, the rows of BUILT_IN, and the commands of the
# config file, which become rows of the same form. A row with a `command` is run as one; the other
# tools are methods of Toolbox. A tool gives back text, and whatever goes wrong is text for the
# model, never an exception. Reading below the working directory is free; everything else asks.
# Nothing here trusts a path before its symbolic links are followed, a file before it is known to be
# one, or a command to end or to be brief.
# ==================================================================================================

RESULT_BYTES = 16 << 10  # of a result that reach the model; the middle is cut out


class ToolError(Exception):
    """What a tool could not do, as a line for the model."""


def path_of(arguments):
    """The path that a call names, after symbolic links."""
    return os.path.realpath(os.path.expanduser(arguments.get("path") or "."))


def file_of(arguments):
    """path_of(), where no directory, pipe or device is."""
    path = path_of(arguments)
    if os.path.exists(path) and not os.path.isfile(path):
        raise ToolError(f"{path} is no regular file.")
    return path


# what a tool may raise; ValueError: a path with a NUL, text that is half a surrogate pair
TOOL_FAULTS = (ToolError, MMError, OSError, TypeError, ValueError)


def text_tool(description, required, **parameters):
    """A row of BUILT_IN whose parameters are all text. required: names of those that must be there;
    parameters: {name: its description}.
    """
    properties = {name: {"type": "string", "description": text}
                  for name, text in parameters.items()}
    schema = {"type": "object", "properties": properties}
    if required:
        schema["required"] = required
    return {"description": description, "parameters": schema}


# name: the tool; its command is an argv with "{parameter}" places
BUILT_IN = {
    "list_files": text_tool(
        "List the files of a directory.", [],
        path="the directory; the working directory if left out"),
    "read_file": text_tool("Read a text file.", ["path"], path="the file"),
    "write_file": text_tool(
        "Write a text file, replacing what it held.", ["path", "content"],
        path="the file", content="its whole new content"),
    "run_command": {
        **text_tool(
            "Run a shell command line in the working directory; gives its output and exit status "
            "(negative: the signal that ended it). It gets no input.", ["command"],
            command="the command line"),
        "command": ["/bin/sh", "-c", "{command}"],
    },
}


class Toolbox:
    """The tools offered to a model, and what they may do.

    names: the tools that are on; commands: the config's own, as check_commands() gives them;
    seconds: time limit of a command, 0 for none; hidden: names of environment variables that hold
    keys; permit: called with the tool's name once a person has seen the call (preview()), gives
    "y", "n" or "a" (always, for this tool); None where nobody can be asked, and then the call is
    refused.
    """

    def __init__(self, names=(), commands=None, seconds=120.0, hidden=(), permit=None):
        self.tools = dict(sorted({**BUILT_IN, **(commands or {})}.items()))
        self.names = list(names)
        self.always = set()
        self.seconds = seconds
        self.hidden = hidden
        self.permit = permit
        self.stopped = self.busy = False  # asked to stop; running a command

    def schemas(self):
        """The `tools` of a request: sorted by name whatever the order in the config, so that a
        server's prompt cache holds.
        """
        return [
            {"type": "function", "function": {
                "name": name,
                "description": tool["description"],
                "parameters": tool["parameters"],
            }}
            for name, tool in self.tools.items() if name in self.names]

    def run(self, call):
        """Runs a finished call (see Calls.finished), asking where it must; yields seconds while a
        command runs; -> (ok, output).
        """
        name = call["name"]
        arguments = call["arguments"]
        try:
            self.check(call)
            self.require_permission(name, arguments)
            tool = self.tools[name]
            if "command" in tool:
                output = yield from self.command(arguments_of(tool, arguments))
            else:
                output = getattr(self, name)(arguments)
            return True, shortened(output)
        except TOOL_FAULTS as error:
            return False, shortened(str(error))
        finally:
            self.busy = False

    def check(self, call):
        """Raises ToolError for a call that cannot be run: broken, or not as the schema wants it."""
        name = call["name"]
        arguments = call["arguments"]
        if arguments is None:
            raise ToolError("The arguments were not a complete JSON object, so nothing was run: "
                            + one_line(call["raw"]))
        if name not in self.names:
            raise ToolError(f"There is no tool called {name!r}, only {sorted(self.names)}.")
        schema = self.tools[name]["parameters"]
        for key, parameter in schema["properties"].items():
            value = arguments.get(key)
            if value is None:
                if key in schema.get("required", []):
                    raise ToolError(f"{name} needs {key}.")
            elif name in BUILT_IN and not isinstance(value, str):
                raise ToolError(f"{name}: {key} must be text.")
            elif value not in parameter.get("enum", [value]):
                raise ToolError(f"{name}: {key} must be one of {parameter['enum']}.")

    def require_permission(self, name, arguments):
        """Raises ToolError unless the call is free or permitted."""
        if name in self.always or self.is_free(name, arguments):
            return
        if not self.permit:
            raise ToolError(
                f"{name} was not run: it needs permission, and nobody can be asked here "
                "(mm -y runs tools without asking).")
        answer = self.permit(name)
        if answer == "a":
            self.always.add(name)
        elif answer != "y":
            raise ToolError(f"{name} was not run: the user refused it.")

    def is_free(self, name, arguments):
        """Whether a call only reads below the working directory."""
        if name not in ("list_files", "read_file"):
            return False
        here = os.getcwd()
        return os.path.commonpath([here, path_of(arguments)]) == here

    def preview(self, call):
        """-> (what a call will do, in one line; the lines that it would change in a file), for a
        person; also for a call that cannot be run.
        """
        name = call["name"]
        arguments = call["arguments"]
        try:
            self.check(call)
            if name == "run_command":
                return f"run {arguments['command']}", []
            if "command" in self.tools[name]:
                import shlex
                return "run " + shlex.join(arguments_of(self.tools[name], arguments)), []
            path = path_of(arguments)
            line = f"{name.split('_')[0]} {path.removeprefix(os.getcwd() + '/')}"
            if name != "write_file":
                return line, []
            old = self.read_file(arguments) if os.path.exists(path) else ""
            return line, difference(old, arguments["content"])
        except TOOL_FAULTS:
            return f"{name} {arguments}", []

    def list_files(self, arguments):
        entries = os.scandir(path_of(arguments))
        rows = [entry.name + ("/" if entry.is_dir() else "") for entry in entries]
        return "\n".join(sorted(rows)) or "(empty)"

    def read_file(self, arguments):
        path = file_of(arguments)
        raw = read_bytes(path, "read_file")
        if b"\0" in raw:
            raise ToolError(f"{path} is not text.")
        return raw.decode("utf-8", "replace")

    def write_file(self, arguments):
        """Writes beside the file and renames, so that a full disk leaves the old content."""
        path = file_of(arguments)
        raw = clean(arguments["content"]).encode()
        os.makedirs(os.path.dirname(path), exist_ok=True)
        beside = f"{path}.{os.urandom(4).hex()}"
        try:
            with open(beside, "xb") as file:
                if os.path.exists(path):
                    open(path, "ab").close()  # raises where it may not be written
                    old = os.stat(path)
                    os.chmod(beside, old.st_mode)
                    os.chown(beside, old.st_uid, old.st_gid)
                file.write(raw)
            os.replace(beside, path)
        finally:
            if os.path.exists(beside):
                os.unlink(beside)
        return f"Wrote {path}."

    def command(self, argv):
        """Runs argv, yielding seconds; -> its output and exit status. Raises ToolError for a
        command that was ended.

        What it leaves in the background goes on, but a command that must be ended (its time is up,
        it writes too much, Ctrl-C) is ended with its whole process group. It writes into a file:
        reading a pipe to its end would wait for what it leaves behind.
        """
        import subprocess
        import tempfile
        self.busy = True  # before all else, as Ctrl-C can come at once
        environment = {key: value for key, value in os.environ.items()
                       if key not in self.hidden and not key.endswith("_API_KEY")}
        with tempfile.TemporaryFile() as file:
            process = subprocess.Popen(
                argv, env=environment, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
            try:
                reason = yield from self.wait_for(process, file)
            finally:
                try:
                    if process.poll() is None:
                        os.killpg(process.pid, signal.SIGKILL)
                        process.wait(1)
                except (OSError, subprocess.TimeoutExpired):
                    pass  # it is another user's (sudo), and goes on
            file.seek(0)
            text = file.read(MOST_TEXT).decode("utf-8", "replace")
        text = text.replace("\0", "\ufffd").rstrip("\n")
        ending = reason or f"exit status {process.returncode}"
        result = f"{text}\n[{ending}]".lstrip("\n")
        if reason or process.returncode < 0:  # negative: a signal ended it
            raise ToolError(result)
        return result

    def wait_for(self, process, file):
        """Waits for a command that writes into a file; yields seconds; -> why it must be ended, or
        "".
        """
        started = time.monotonic()
        while process.poll() is None:
            seconds = time.monotonic() - started
            if self.stopped:
                return "ended by the user"
            if self.seconds and seconds > self.seconds:
                return f"ended after its time limit of {self.seconds:g} s"
            if os.fstat(file.fileno()).st_size > MOST_TEXT:
                return f"ended after {MOST_TEXT >> 20} MiB of output"
            yield seconds
            time.sleep(0.02)
        return ""


def difference(old, new):
    """The lines in which two texts differ, for a person."""
    import difflib
    if old == new:
        return ["(no change)"]
    old = old.split("\n")
    new = new.split("\n")
    if len(old) * len(new) > 400_000:  # the time of a comparison grows with the product
        return [f"-{len(old):,} lines", f"+{len(new):,} lines"]
    return list(difflib.unified_diff(old, new, lineterm="", n=2))[2:]


def shortened(text):
    """A result of at most RESULT_BYTES, cut in the middle, and saying so."""
    raw = clean(text).encode()
    left_out = len(raw) - RESULT_BYTES
    if left_out > 0:
        half = RESULT_BYTES // 2
        gap = f"\n[… {left_out:,} bytes left out …]\n".encode()
        raw = raw[:half] + gap + raw[-half:]
    return raw.decode("utf-8", "ignore")


# -- commands of the config

PLACE = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
COMMAND_FORM = ("wants description, command: [PROGRAM, '{NAME}'] and parameters: {type: object, "
                "properties: {NAME: {type: string}}, required: [NAME]}")


def arguments_of(tool, arguments):
    """A command's argv with its places filled; a place of its own whose parameter is left out goes
    away.
    """
    texts = {name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
             for name, value in arguments.items() if value is not None}
    argv = []
    for part in tool["command"]:
        place = PLACE.fullmatch(part)
        if not place or place[1] in texts:
            argv.append(PLACE.sub(lambda found: texts.get(found[1], ""), part))
    return argv


def check_commands(commands, where):
    """The config's own tools, ready for a Toolbox. Raises MMError("config") with a line per fault.
    """
    tools = {}
    faults = []
    for name, entry in commands.items():
        try:
            tools[name] = own_tool(name, **entry)
        except MMError as error:
            faults.append(f"{where}.{name}: {error.message}")
        except (AttributeError, LookupError, TypeError):
            faults.append(f"{where}.{name}: {COMMAND_FORM}")
    if faults:
        raise MMError("config", "\n".join(faults))
    return tools


def own_tool(name, command, parameters=None, description=""):
    """A tool in the form of BUILT_IN's, from the keys of its entry in the config. Raises
    MMError("config"), and AttributeError, LookupError or TypeError for any other form than
    COMMAND_FORM.
    """
    if name in BUILT_IN or not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
        raise MMError(
            "config", "a tool's name has letters, digits, _ and -, and is none of mm's own")
    schema = {"properties": {}, **typed(parameters or {}), "type": "object"}
    properties = schema["properties"]
    are_maps = all(isinstance(parameter, dict) for parameter in properties.values())
    # the model fills parameters; which program runs is not its choice
    if not are_maps or not isinstance(command, list) or PLACE.fullmatch(command[0]):
        raise TypeError
    for used in [*schema.get("required", []), *PLACE.findall(" ".join(command))]:
        if used not in properties:
            raise MMError(
                "config", f"{used}, in required or in command, is not in parameters.properties")
    return {"description": description or name, "parameters": schema, "command": command}


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
        row = self.rows[kind]
        first = int(((since or now) - self.started) * 10)
        last = int((now - self.started) * 10)
        share = tokens / (last - first + 1)
        for tenth in range(first, last + 1):
            row[tenth] = row.get(tenth, 0) + share


def counted_tokens(usage, timings):
    """-> (prompt tokens, those of them that were cached, produced tokens, the thinking in them), 0
    where neither usage nor llama.cpp's timings tell.

    Cached tokens and thinking are a part of the others, as OpenAI counts them, or stand beside
    them (Anthropic's cache, xAI's thinking): total_tokens tells, and that no part is larger than
    its whole.
    """
    def count(path, figures=usage):
        return as_int(dig(figures, path, ""))

    prompt = count("prompt_tokens")
    produced = count("completion_tokens")
    thinking = count("completion_tokens_details.reasoning_tokens")
    cached = count("prompt_tokens_details.cached_tokens")
    cached = cached or count("prompt_cache_hit_tokens") or count("cache_read_input_tokens")
    beside = count("total_tokens") - prompt - produced  # what is in neither
    if thinking > produced or thinking == beside:
        produced += thinking
        beside -= thinking
    if cached > prompt or cached == beside:
        prompt += cached
    if not prompt:
        cached = count("cache_n", timings)
        prompt = cached + count("prompt_n", timings)
    return prompt, cached, produced or count("predicted_n", timings), thinking


class Reply:
    """What one model call has brought so far, and when."""

    def __init__(self, timeline=None):
        self.timeline = timeline or Timeline()
        self.answer = io.StringIO()
        self.thought = io.StringIO()
        self.calls = Calls()
        self.finish = self.usage = self.timings = None
        self.model = self.id = ""  # as the server calls them
        self.extra = {}  # fields that only this server knows
        self.media = ""  # "image" or "audio", where the answer has any
        self.tokens = dict.fromkeys(TOKENS, 0)
        self.seconds = dict.fromkeys(TOKENS, 0.0)
        self.first_token = None
        self.prompt_tokens = 0  # that the server has read, as it last said, at `prompt_time`
        self.started = self.last = self.prompt_time = time.monotonic()

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

    def count_prompt(self, tokens):
        """Counts the prompt tokens read since the last report: llama.cpp tells it once in 2,048."""
        now = time.monotonic()
        new = tokens - self.prompt_tokens
        if new > 0:
            self.timeline.add("prompt", new, now, self.prompt_time)
            self.prompt_tokens = tokens
            self.prompt_time = now

    def write(self, kind, text):
        """Keeps a piece of the answer, or of the thinking, which may have to go back."""
        kept = self.answer if kind == "answer" else self.thought
        kept.write(text)
        if kept.tell() > MAX_LINE:
            raise MMError("protocol", f"the answer passed {MAX_LINE >> 20} Mi characters")

    def add_extra(self, fields):
        """Keeps fields that only this server knows; a list goes on where it stopped."""
        for key, value in fields.items():
            if isinstance(value, list):
                value = self.extra.get(key, []) + value
            self.extra[key] = value

    def produced_tokens(self):
        """-> (tokens of thinking, tokens of answer and calls): the server's figures, else a delta
        is a token.
        """
        deltas = sum(self.tokens.values())
        _, _, produced, thinking = counted_tokens(self.usage, self.timings)
        produced = produced or deltas
        thinking = thinking or produced * self.tokens["reasoning"] // max(1, deltas)
        return thinking, max(0, produced - thinking)

    def is_thinking(self):
        """Whether the model thinks right now, in a stream that can be named to its server."""
        return bool(self.id and self.tokens["reasoning"] and not self.tokens["answer"])

    def finished_calls(self):
        """The calls of the answer; none behind an end that is not known to be a good one."""
        return self.calls.finished() if (self.finish or "").lower() in ENDED else []


def read_reply(incoming, reply, tags=None):
    """Takes deltas into `reply` and yields them as events: reasoning, answer, progress, notice, and
    mm's own `waiting`. tags: the ThinkTags that part its answer, or None.
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
            processed, total = value
            reply.count_prompt(processed)
            yield {"type": "progress", "processed": processed, "total": total}
        elif kind == "notice":
            yield notice(value)
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


SUMMARY = """Sum up the conversation below, so that it can be continued from your summary alone: \
what was asked, what was found and decided, names, numbers, paths and code that matter, and what \
is still open. Write the summary only.

"""
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
        self.backend = backend
        self.settings = settings
        self.session = session
        self.toolbox = toolbox or Toolbox()
        self.record = record or (lambda item: None)
        self.restartable = restartable
        self.may_end_thinking = end_thinking
        self.tap = tap
        self.protocol = PROTOCOLS[backend.entry["protocol"]](backend)
        self.system = settings["system"]
        self.think = settings["think"]
        # of {"role", "content", "tool_calls", "tool_call_id"} and mm's own "origin" (see Echo)
        self.history = []
        self.is_new_question = False  # whether no server has taken the last message, a question
        self.withdrawn = ""  # the last question, if it was refused: no history keeps it
        # what mm itself parted stays here
        self.echo = Echo(backend, settings["reasoningEcho"] and not self.protocol.tags(None))
        self.refused = set()  # optional request fields that this server does not take
        self.named_tags = False
        self.answered = set()  # models that have answered under another name, and were looked for
        # the ModelCall that runs, or ran until a pause before the next attempt, in which Ctrl-C
        # counts too
        self.call = None
        # its thinking can be ended ("can"), is to be ("wanted"), the server was asked to ("asked")
        self.ending = ""
        self.window = settings["contextWindow"]
        self.probes = 0
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
        self.withdrawn = ""
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
        try:
            yield from work
        except MMError as error:
            is_refused = error.kind not in ("cancelled", "stalled", "interrupted")
            if is_refused and self.is_new_question:
                self.withdrawn = self.history.pop()["content"]
                if self.session:
                    self.session.withdraw()
            yield error_event(error)
        finally:
            if self.partial:
                self.remember({"role": "assistant", "content": self.partial})
                self.partial = ""
            self.is_new_question = False

    def remember(self, message):
        self.history.append(message)
        self.is_new_question = message["role"] == "user"
        self.record(without_thought(message))

    def replace_history(self, history):
        self.history[:] = history
        self.is_new_question = False
        self.measured = (0, 0)
        self.record({"history": [without_thought(message) for message in history]})

    def interrupt(self):
        """Ctrl-C; safe in a signal handler. Ends the thinking if it can, else the turn; -> False
        where it can do neither.
        """
        if self.stopped or not (self.call or self.toolbox.busy):
            return False
        if self.ending == "can" and self.replies[-1].is_thinking():
            self.ending = "wanted"
            self.call.wake()
            return True
        if self.call:
            self.call.stop()
        self.stopped = self.toolbox.stopped = True
        return True

    def steps(self):
        """Model calls and tool calls in turn, until the model answers."""
        most = self.settings["maxSteps"] or sys.maxsize
        for _ in range(most):
            yield from self.make_room()
            reply = yield from self.model_call()
            calls = reply.finished_calls()
            answer = reply.answer.getvalue()
            self.partial = ""
            message = {"role": "assistant", "content": answer, **self.echo.label(reply, calls)}
            if calls:
                message["tool_calls"] = calls
            if answer.strip() or calls:
                self.remember(message)
            self.measure(reply)
            if not calls:
                yield from verdict(reply)
                yield from self.check_model(reply.model)
                return
            for call in calls:
                yield from self.tool_call(call)
        raise MMError("steps", f"stopped after {most} model calls in one turn: "
                      "ask it to go on, or raise --max-steps (maxSteps)")

    def tool_call(self, call):
        """Runs or refuses one call. After a Ctrl-C, the rest have no result, and to_messages()
        tells the model so.
        """
        # else it is no call that could be shown, and its result says why
        if call["arguments"] is not None:
            yield {**tool_call_event(call), "preview": lambda: self.toolbox.preview(call)}
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

    def model_call(self, asked=None):
        """One model call, asked again where that can help, with the same bytes unless something is
        left out of them; no tool runs again. -> its complete Reply.

        asked: the messages of a request that is not the conversation's own (a summary's).
        """
        tries = 0
        loading = False
        started = time.monotonic()
        while True:
            reply = Reply(None if asked else self.timeline)
            try:
                yield from self.read(reply, asked)
                return reply
            except MMError as error:
                if self.stopped:
                    raise
                hint = self.unlisted_model() if error.kind == "not_found" else ""
                if hint:
                    error.message += f" · {hint}"
                left_out = yield from self.leave_out(error, reply, asked)
                if left_out:
                    continue
                if not self.may_try_again(error, reply, tries, time.monotonic() - started):
                    raise
                was_loading = loading
                loading = error.again == "loading"
                tries += not loading
                if not asked and not (loading and was_loading):  # loading is said once
                    yield {"type": "retry", "reason": error.message}
                yield from self.pause(0 if error.again == "stream" else error.wait)
            finally:
                # a second try that brings nothing does not take away what the first one brought
                if not asked:
                    self.partial = reply.answer.getvalue() or self.partial
                self.call = None
                self.ending = ""

    def leave_out(self, error, reply, asked):
        """Leaves out of the next request what the one that ended in `error` was refused for: an
        optional field, earlier thinking, or turns that do not fit. -> whether there was any.

        asked: see model_call().
        """
        if reply.first_token is not None:
            return False
        missing = re.search(r"\b(reasoning_content|reasoning)\b.*HTTP 400", error.message)
        refuses_thinking = refuses_thoughts(error)
        if error.again == "field" and error.field not in self.refused:
            self.refused.add(error.field)
            if error.field in self.backend.entry["fields"]:
                return True  # nobody has asked for it
            left_out = error.field
        elif asked:
            return False
        elif error.again == "tools" and self.toolbox.names:
            self.toolbox.names = []
            left_out = "tools"
        elif self.thought_tokens and (refuses_thinking or error.kind == "overflow"):
            self.echo.forget(self.history, refuses_thinking)
            left_out = "the earlier thinking"
        elif missing and not self.echo.insists and any("tool_calls" in m for m in self.history):
            self.echo.insists = missing.group(1)
            return True
        elif error.kind == "overflow" and self.can_sum_up:
            self.window = self.window or error.window
            return (yield from self.compact())
        else:
            return False
        yield notice(f"{error.message}: asked again without {left_out}")
        return True

    def unlisted_model(self):
        """unknown_model() by the list of a server of one's own, which is asked for it; else ""."""
        if not takes_first_model(self.backend):
            return ""
        return unknown_model(self.backend, probe(self.backend)["models"])

    def check_model(self, served):
        """A notice where a server has answered by another model than the one that was named."""
        if not served or served in self.answered or same_model(served, self.backend.model):
            return
        self.answered.add(served)  # the server's list is asked for once a name
        message = self.unlisted_model()
        if message:
            yield notice(f"{message}: {served} has answered")

    def may_try_again(self, error, reply, tries, elapsed):
        """Whether the call that ended in `error` is made once more (see MMError.again)."""
        if error.again == "loading":
            return elapsed < (self.settings["firstTokenTimeout"] or math.inf)
        if error.again not in ("stream", "busy") or reply.finish is not None:
            return False
        can_be_taken_back = self.restartable or not reply.answer.tell()
        return tries < self.settings["retries"] and can_be_taken_back

    def pause(self, seconds):
        for tenth in range(round(seconds * 10)):
            yield {"type": "waiting", "seconds": tenth / 10}
            time.sleep(0.1)
            if self.stopped:
                raise MMError("cancelled", "stopped")

    def request(self):
        """The body of the conversation's next request."""
        tools = self.toolbox.schemas()
        history, self.thought_tokens = self.echo.outgoing(self.history, tools)
        # options (-o) are the strongest: section 14 has laid them over the provider's own
        sampling = merged(self.settings["sampling"], self.backend.entry["sampling"])
        return self.protocol.body(history, self.system, tools, sampling, self.think, self.refused)

    def read(self, reply, asked):
        """One request and its stream into `reply`, as events; of a summary, how it grows.

        asked: see model_call().
        """
        if asked:
            think = False
            body = self.protocol.body(asked, "", [], {}, False, self.refused)
        else:
            think = self.think
            body = self.request()
            self.replies.append(reply)
            if self.may_end_thinking and "reasoning_control" in body:
                self.ending = "can"
        raw = serialised(body)
        for event in read_reply(self.start_call(raw), reply, self.protocol.tags(think)):
            if event["type"] != "waiting":  # the server has taken the question
                self.is_new_question = False
            if asked and reply.first_token is not None:
                event["summing_up"] = sum(reply.tokens.values())
            if not asked or event["type"] not in TOKENS:
                yield event
            if self.ending == "wanted":  # Ctrl-C
                self.ending = "asked"
                if not self.protocol.end_thinking(reply.id):
                    raise MMError("cancelled", "stopped")
        yield from truncation_hint(raw, reply)
        if not self.named_tags and has_lone_end(reply.answer.getvalue()):
            self.named_tags = True
            yield notice("this answer has a closing </think> and no opening one: `thinkTags: open` "
                         "for this provider in the config parts the thinking from it")

    def start_call(self, raw):
        """The ModelCall that posts these bytes; what goes wrong with --tap is one of its deltas."""
        def open_stream(connection):
            return self.protocol.stream(raw, connection, self.tap, call.say)

        watchdog, first_token = self.settings["watchdogTimeout"], self.settings["firstTokenTimeout"]
        waits_for_call = self.toolbox.names and not self.backend.entry["streamsCalls"]
        if self.settings.source("watchdogTimeout"):  # a person has set it, so it counts
            waits_for_call = False
        call = self.call = ModelCall(open_stream, watchdog, first_token, waits_for_call)
        return call

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
        return tokens + self.echo.outgoing(self.history, tools)[1]

    def make_room(self):
        """Before a call: compacts once the next prompt passes compactAt of the window."""
        if self.can_sum_up and len(self.history) > 1:
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
        if not everything:
            cut = max(index for index, message in enumerate(self.history)
                      if message["role"] == "user")
        if cut < 2:  # nothing, or an earlier summary
            return (yield from self.drop_results())
        try:
            summary = yield from self.summary(self.history[:cut])
        except MMError as error:
            if self.stopped:
                raise
            self.can_sum_up = False
            yield notice(f"the conversation stays as it is, without a summary: {error.message}")
            return False
        summary = {"role": "user", "content": SUMMED_UP + summary}
        self.replace_history([summary, *self.history[cut:]])
        yield notice(f"the {cut} messages before this were replaced by a summary")
        return True

    def drop_results(self):
        """Takes the tool results but the last two out of the only turn there is; -> whether there
        were any.
        """
        large = [message for message in self.history
                 if message["role"] == "tool" and len(message["content"]) > 400][:-2]
        for message in large:
            message["content"] = "[This result was taken out to make room.]"
        if large:
            self.replace_history(list(self.history))
            yield notice(f"the context was full: {len(large)} older tool results were taken out")
        return bool(large)

    def summary(self, messages):
        """A summary of messages, asked for with thinking off. Raises MMError if there is none."""
        # three characters a token is cautious, and the summary itself needs room
        text = transcript(messages, int(self.window * 0.6) * 3)
        reply = yield from self.model_call([{"role": "user", "content": SUMMARY + text}])
        answer = reply.answer.getvalue()
        if self.backend.entry["thinkTags"]:  # the template may have opened the block all the same
            answer = answer.split(THINK_END, 1)[-1]
        answer = answer.strip()
        if not answer or reply.finish == "length":
            raise MMError("empty", f"the summary was {'cut' if answer else 'empty'}")
        return answer

    # -- what a person changes in between

    def clear(self):
        """Forgets the conversation, and what was permitted; what was recorded stays in its own
        session.
        """
        self.history.clear()
        self.measured = (0, 0)
        self.toolbox.always.clear()
        if self.session:
            self.session.renew()

    def use(self, model=None, system=None):
        """Another model, whose context is not known yet, or another system prompt, from the next
        question on.
        """
        if model is not None:
            self.backend.model = model
            self.measured = (0, 0)
            self.probes = 0
            self.window = self.settings["contextWindow"]
        if system is not None:
            self.system = system
        about = {"model": self.backend.model, "system": self.system}
        if self.session:
            self.session.about.update(about)
        if self.history:
            self.record(about)

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
    """Messages as text. Where they take more than `room` characters (0: any), the longest are cut
    in the middle, such as what a tool gave.
    """
    parts = []
    for message in messages:
        parts.append(f"{message['role'].upper()}: {message['content']}")
        for call in message.get("tool_calls", []):
            arguments = json.dumps(call["arguments"], ensure_ascii=False)
            parts.append(f"CALL {call['name']} {arguments}")
    limit = max(map(len, parts))
    while sum(min(len(part), limit) for part in parts) > room > 0:
        limit = limit * 3 // 4
    half = limit // 2
    for index, part in enumerate(parts):
        if len(part) > limit:
            parts[index] = f"{part[:half]} […] {part[len(part) - half:]}"
    return "\n\n".join(parts)


def done_event(provider, model, session, replies, started, timeline=None):
    """The `done` of a turn; beside its fields, for figures(): `tokens` (thinking, answer) of all
    its calls, and the Timeline.
    """
    last = replies[-1] if replies else Reply()
    waits = [reply.first_token for reply in replies if reply.first_token is not None]
    thinking = answer = 0
    for reply in replies:
        thoughts, rest = reply.produced_tokens()
        thinking += thoughts
        answer += rest

    def spent(*kinds):
        return rounded(sum(reply.seconds[kind] for reply in replies for kind in kinds))

    seconds = {"first_token": rounded(waits[0]) if waits else None,
               "thinking": spent("reasoning"), "answer": spent("answer", "call"),
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
    """A notice where the server counts far fewer tokens than were sent: Ollama and others drop what
    does not fit and say nothing.

    Eight characters that are no white space and no \\u escape make at least one token, in any text
    people send.
    """
    counted = counted_tokens(reply.usage, None)[0]
    sent = len(body.decode().replace(" ", "").replace("\\n", ""))
    if sent > 8000 and 0 < counted < sent / 8:
        yield notice(f"the server read {counted:,} prompt tokens where about {sent // 4:,} were "
                     "sent: it cuts what does not fit its context")


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
    notice: called with what went wrong; path: of a session that goes on.
    """

    def __init__(self, about, notice, path=""):
        self.about = about
        self.notice = notice
        self.broken = False
        self.renew()
        self.path = path or self.path

    def renew(self):
        """Begins another session; its file is made with its first message."""
        name = time.strftime("%Y%m%d-%H%M%S-") + os.urandom(2).hex()
        self.path = os.path.join(sessions_folder(), f"{name}.jsonl")
        self.start = self.end = 0  # where in the file the line stands that was written last

    @property
    def id(self):
        return session_id(self.path)

    def record(self, item):
        """Appends a message, or any other item of JSON, as one line."""
        if self.broken:
            return
        try:
            # a new history must not replace what another process has said here
            if "history" in item and self.end and os.path.getsize(self.path) != self.end:
                self.renew()
            self.append(serialised(item) + b"\n")
        except OSError as error:
            self.broken = True
            self.notice(f"the conversation is not saved: {self.path}: {error.strerror}")

    def append(self, line):
        import functools
        os.makedirs(os.path.dirname(self.path), mode=0o700, exist_ok=True)
        with open(self.path, "ab+", buffering=0,
                  opener=functools.partial(os.open, mode=0o600)) as file:
            self.start = file.tell()
            if not self.start:
                line = serialised({"session": 1, **self.about}) + b"\n" + line  # 1: the format
            elif os.pread(file.fileno(), 1, self.start - 1) != b"\n":
                line = b"\n" + line
            while line:  # a write can stop early; on a full disk, the next one says so
                line = line[file.write(line):]
            self.end = file.tell()

    def withdraw(self):
        """Takes the last line out again: a question that no server has taken. It stays where
        another process has written since; a session that would be empty goes.
        """
        try:
            if os.path.getsize(self.path) != self.end:
                return
            os.truncate(self.path, self.start)
            self.end = self.start
            if not self.start:
                os.unlink(self.path)
        except OSError:
            pass  # then it stays


def load_session(path):
    """-> (about, history, [what a person should hear of it]). Raises MMError("config") if it cannot
    be read at all.
    """
    where = f"session {session_id(path)}"
    rows = read_bytes(path, "session").split(b"\n")  # at LF only: U+2028 is text
    about = {}
    history = []
    damaged = []
    notes = []
    for number, row in enumerate(rows, 1):
        if not row.strip():
            continue
        try:
            item = read_json(row.decode("utf-8-sig"))
            if "role" in item:
                history.append(stored_message(item))
            elif "history" in item:
                history = [stored_message(message) for message in item["history"]]
            else:  # the first line, or a change of it
                for key in item.keys() & {"provider", "model", "url", "system"}:
                    about[key] = str(item[key])
        except (AttributeError, KeyError, TypeError, ValueError):
            damaged.append(str(number))
    if damaged:
        lines = one_line(", ".join(damaged), 60)
        notes.append(f"{where}: line {lines} cannot be read, and was skipped")
    last = history[-1] if history else {"role": "assistant"}
    answered = last["role"] == "assistant" and "tool_calls" not in last
    if not answered and not last["content"].startswith(SUMMED_UP):
        notes.append(f"{where}: the last question has no answer")
    return about, history, notes


def stored_message(item):
    """A line of a session file, if it is a message. Raises KeyError, TypeError or ValueError."""
    is_known = item["role"] in ("user", "assistant") or "tool_call_id" in item
    is_whole = all(call.keys() >= {"id", "name", "arguments"} for call in item.get("tool_calls", []))
    if not is_known or not is_whole or not isinstance(item["content"], str):
        raise ValueError
    return item


def list_sessions():
    """The paths of all sessions, the newest first."""
    import glob
    paths = glob.glob(os.path.join(glob.escape(sessions_folder()), "*.jsonl"))
    return sorted(filter(os.path.isfile, paths), key=os.path.getmtime, reverse=True)


def find_session(start):
    """The path of the session whose id begins with `start`; of the newest one for "". Raises
    MMError("config").
    """
    paths = {session_id(path): path for path in list_sessions()}
    if start in paths:
        return paths[start]
    matching = [path for key, path in paths.items() if key.startswith(start)]
    shown = one_line(start, 40)
    if not matching:
        raise MMError("config", f"{sessions_folder()} holds no session {shown}")
    if start and len(matching) > 1:
        raise MMError("config", f"more than one session begins with {shown} (mm --sessions)")
    return matching[0]


def session_lines(most=50):
    """--sessions: a line each: id, when, how many messages, the first question."""
    rows = []
    for path in list_sessions()[:most]:
        try:
            history = load_session(path)[1]
        except MMError as error:
            rows.append(error.message)
            continue
        questions = [message["content"] for message in history if message["role"] == "user"]
        first = one_line((questions or ["(empty)"])[0], 60)
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(os.path.getmtime(path)))
        rows.append(f"{session_id(path)}  {when}  {len(history):>4}  {first}")
    return rows or ["no session is saved yet"]


def as_markdown(history, system):
    """A conversation as a text to keep (/save FILE)."""
    parts = [f"**system**\n\n{system}"] if system.strip() else []
    for message in history:
        content = message["content"]
        if message["role"] == "tool":
            content = f"```\n{content}\n```"
        for call in message.get("tool_calls", []):
            arguments = json.dumps(call["arguments"], ensure_ascii=False)
            content += f"\n\n`{call['name']} {arguments}`"
        parts.append(f"**{message['role']}**\n\n{content}".rstrip())
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
        tools = box.tools
        names = set(rest.replace(",", " ").split())
        for name in names.difference(tools, ["all", "none"]):
            self.say(f"there is no tool called {name}")
        switched = {"all": tools, "none": ()}.get(rest, names.symmetric_difference(box.names))
        box.names = [name for name in tools if name in switched]
        for name, tool in tools.items():
            mark = "x" if name in box.names else " "
            self.say(f"  [{mark}] {name}  {one_line(tool['description'], 70)}")
        if box.names and not self.conversation.protocol.applies_template:
            self.say(NO_RAW_TOOLS)

    def do_retry(self, rest):
        """/retry                  ask the last question again"""
        if self.conversation.withdrawn:
            return self.ask(self.conversation.withdrawn)
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
    return Backend("demo", {}, url, "scripted"), ["--demo: a script answers, not a model"]


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
            hint = did_you_mean(message.split()[-1], self._option_string_actions)
            raise MMError("config", f"{message}{hint} (mm --help)")

        def _print_message(self, message, file=None):
            sys.stdout.write(message)
            sys.stdout.flush()

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
    end = [*argv, "--"].index("--")
    args = parser().parse_intermixed_args(argv[:end])
    words = readable(" ".join(args.question + argv[end + 1:]))
    args.question = words if words.strip() else ""
    at_terminal = sys.stdin.isatty()
    if at_terminal and not args.question and not args.file:
        args.interactive = True
    args.attended = at_terminal and not args.json
    return args


def sampling_options(pairs):
    """-o KEY=VALUE pairs as a dict; dots nest, VALUE is JSON if it parses. Raises
    MMError("config").
    """
    out = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or key in ("model", "messages", "tools", "prompt"):
            raise MMError("config", f"-o {pair}: wants KEY=VALUE, and no KEY that mm fills in")
        field = json_or_text(value)
        for part in reversed(key.split(".")):
            field = {part: field}
        out = merged(out, field)
    return out


# -- the question

def question_of(args, say):
    """The question: its words, files and piped text. Raises MMError("config") where there is none,
    unless a conversation follows.
    """
    texts = {path: fenced(path) for path in args.file}
    if not args.interactive:
        texts["standard input"] = piped_text(say)
    for name, text in texts.items():
        if "\ufffd" in text:
            say(f"{name} is not all UTF-8 text: what could not be read is \ufffd now")
    question = "\n\n".join(filter(str.strip, [args.question, *texts.values()]))
    if not question and not args.interactive:
        raise MMError("config", 'there is no question: mm "your question", or pipe one in '
                                "(mm --help)")
    return question


def fenced(path):
    """A file of text, named, between fences that are longer than any in it."""
    raw = read_bytes(path, "-f")
    text, name = as_text(raw).rstrip(), readable(path)
    if text.count("\ufffd") > max(10, len(raw) // 20):
        raise MMError("config", f"-f {name}: this is no text ({len(raw):,} bytes)")
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{name}:\n{fence}\n{text}\n{fence}"


def piped_text(say):
    """What was piped into mm, or "" when stdin is a terminal, closed or empty."""
    import select
    if sys.stdin.isatty():
        return ""
    if not select.select([sys.stdin], [], [], 2.0)[0]:
        say("waiting for the end of standard input (`< /dev/null` if none is meant)")
    try:
        raw = sys.stdin.buffer.read(MOST_TEXT + 1)
    except OSError:
        return ""  # nohup hands over one that cannot be read
    if len(raw) > MOST_TEXT:
        raise MMError("config", f"standard input is larger than {MOST_TEXT >> 20} MiB")
    return as_text(raw).rstrip("\n")


def as_text(raw):
    """Bytes of a file or a pipe as text: UTF-8, or UTF-16 if they begin so. What is neither becomes
    U+FFFD.
    """
    encoding = "utf-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    return raw.decode(encoding, "replace").replace("\0", "\ufffd")


# -- the conversation

def resumed(args, settings, say):
    """-> (the resumed session's path or "", its history). What it remembers becomes a setting,
    unless an option says otherwise.
    """
    if not args.resume and not args.last:
        return "", []
    path = find_session(args.resume)
    about, history, damage = load_session(path)
    last = "nothing"
    for message in history:
        if message["role"] == "user":
            last = one_line(message["content"], 60)
    source = f"session {session_id(path)}"
    say(f"{source}, {len(history)} messages; asked last: {last}", *damage)
    server = settings["provider"] if settings.is_option("provider") else ""
    if settings.is_option("url"):
        server = show_url(base_url(settings["url"])[0])
    if server:
        if server != (about.get("url") or about.get("provider")):
            about["model"] = ""  # the one that it remembers is another server's
        about.update(provider="", url="")
    for key, value in about.items():
        if value and not settings.is_option(key):
            settings.put(key, value, source)
    return path, history


def make_toolbox(args, settings, view):
    """The tools that are offered. Raises MMError("config") for one that there is not."""
    permit = None  # a tool that would be asked for is refused
    if args.yes:
        permit = lambda name: "y"
    elif args.attended and view.side.terminal:
        permit = view.permit
    commands = check_commands(settings["commands"], settings.source("commands"))
    hidden = {entry["apiKeyEnv"] for entry in provider_table(settings).values()}
    toolbox = Toolbox([], commands, settings["commandTimeout"], hidden, permit)
    wanted, known = settings["tools"], toolbox.tools
    for name in wanted:
        check_name(name, [*known, "all", "none"], "tool", settings.source("tools"))
    toolbox.names = [name for name in known if name in wanted or "all" in wanted]
    return toolbox


def make_session(settings, backend, say, path):
    """The Session of a conversation; path: of the one that is resumed, or ""."""
    about = {
        "provider": "" if backend.plain else backend.name,
        "model": backend.model,
        "url": show_url(backend.url) if settings["url"] else "",
        "system": settings["system"],
    }
    session = Session(about, say, path)
    if path:
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
    backend = conversation.backend
    if not conversation.protocol.applies_template and not backend.entry["template"]:
        yield "no template is named for the raw prompts: chatml is used (template in the config)"
    if conversation.toolbox.names:
        is_asked = asks_server and backend.entry["tools"]
        reason = no_tools_reason(backend, probe(backend)["tools"] if is_asked else None)
        if reason:
            yield reason
    if not can_switch_thinking(conversation):
        yield NO_SWITCH


# -- what needs no conversation

def check(backend, settings, view):
    """--check: what would be used and whether it answers; -> exit code."""
    answer = probe(backend)
    fault, models = answer["fault"], answer["models"] or []
    if models and takes_first_model(backend):
        backend.model = backend.model or models[0]
    tools = "the model's template takes them" if answer["tools"] else "not told"
    rows = {
        "provider": backend.name,
        "url": show_url(backend.url),
        "model": unknown_model(backend, models) or backend.model or "none named: -m MODEL",
        "key": f"{'from' if backend.key else 'none in'} ${backend.entry['apiKeyEnv']}",
        "answers": f"no: {fault.message}" if fault else f"yes, {len(models)} model(s)",
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


def show_template(path, view, say):
    """--template-of: the template on stdout, and what mm makes of it beside it."""
    template, form = template_of(path)
    note = f"template: {form or 'none of ' + ', '.join(TEMPLATES)}"
    if THINK in template:
        note += " · it knows <think> (thinkTags: true has the block opened in the prompt)"
    print_rows([template.rstrip("\n")], view)
    say(note)
    return 0


# -- a run

def run(args, view):
    """Carries out a parsed command line; -> exit code. Raises MMError."""
    def say(*messages):
        for message in messages:
            view.show(notice(message))

    if args.template_of:
        return show_template(args.template_of, view, say)
    if args.sessions:
        return print_rows(session_lines(), view)
    settings = load_settings(vars(args), args.config)
    if not args.json or settings.is_option("showThinking"):  # a program asks for its own
        view.hide = not settings["showThinking"]
    if args.replay:
        return show_replay(args.replay, settings, view)
    if args.interactive and view.out.terminal:
        view.side = view.out  # all on one screen
    say(*settings.notices)
    path, history = resumed(args, settings, say)
    sampling, toolbox = sampling_options(args.option), make_toolbox(args, settings, view)
    need_requests()  # or a pipe would be read in vain
    if args.demo:
        backend, notices = start_demo()
        say(*notices)
    else:
        servers = candidates(settings, say)
    is_look = args.check or args.models
    question = "" if is_look else question_of(args, say)
    if not args.demo:
        backend = resolve(settings, servers, say, needs_model=not is_look)
    if args.check:
        return check(backend, settings, view)
    if args.models:
        return print_rows(list_models(backend), view)
    backend.entry["sampling"] = merged(backend.entry["sampling"], sampling)
    session = None
    if settings["save"] and not args.demo:
        session = make_session(settings, backend, say, path)
    conversation = Conversation(
        backend, settings, toolbox, session and session.record, session,
        restartable=args.json or sys.stdout.isatty(), end_thinking=args.attended,
        tap=open_tap(args.tap))
    conversation.history += history
    say(*without_effect(conversation, asks_server=not args.interactive))
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
    sys.stdin = sys.stdin or open(os.devnull)
    sys.stderr = sys.stderr or open(os.devnull, "w")
    # it fails, as any output that cannot be written should
    sys.stdout = sys.stdout or open(os.devnull)
    # Python's own sign of the C locale, which mostly means that none is set: UTF-8 is meant
    encoding = "utf-8" if sys.stdout.errors == "surrogateescape" else None
    sys.stdin.reconfigure(errors="surrogateescape")
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding=encoding, errors="replace")
        # a parent can hand over a pipe that does not block: a write would lose what does not fit
        os.set_blocking(stream.fileno(), True)
    os.set_blocking(sys.stdin.fileno(), True)


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
            side.say(f"mm: the output cannot be written: {error.strerror or error}\n")
        return 1
    except Exception as error:  # a fault of mm's own, which a traceback would not mend for its user
        side.say(f"mm: this is a fault in mm: {type(error).__name__}: {one_line(error, 300)}\n")
        return 1
    finally:
        ending = True


if __name__ == "__main__":
    # everything is written; taking the modules down would take as long as a tenth of a one-shot
    os._exit(main())
