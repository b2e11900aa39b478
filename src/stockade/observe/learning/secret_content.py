"""Recognise secrets by their shape: in a file before learning grants it, in a variable before it is passed.

A key or a token of a known form counts everywhere. What only looks like a password (`password = hunter2`, one
line of random letters) counts in data and settings, but not in source code and documentation, where such
lines are examples and identifiers. In doubt the answer is yes: a question costs the user little.
"""

from __future__ import annotations

import os
import re

from stockade.linux import openat2

#: How many bytes of a text are looked at, and of a file that is no text.
MOST_TEXT, MOST_BINARY = 8 << 20, 4096

_GAP = r"""(?:[\s"'+,]|\\[nr]){1,40}"""
#: Keys and tokens with a form of their own, by words of which the text has one: those are found quickly, and
#: the expression is tried only then.
FORMS: dict[str, tuple[str, str]] = {
    # With its body: programs that read keys have the first line alone in their source.
    "PRIVATE": (
        "a private key",
        r"-{4,5} ?BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)? ?-{4,5}"
        rf"{_GAP}(?:[A-Z][A-Za-z-]{{2,20}}: [^\n\\]{{1,100}}{_GAP}){{0,4}}[A-Za-z0-9+/]{{16}}",
    ),
    "PuTTY-User-Key-File-": ("a private key", r"PuTTY-User-Key-File-\d: \S"),
    "AGE-SECRET-KEY-1": ("a private key", r"AGE-SECRET-KEY-1[0-9A-Z]{20}"),
    "AGE-PLUGIN-": ("a private key", r"AGE-PLUGIN-[A-Z0-9-]{1,40}-1[0-9A-Z]{20}"),
    "untrusted": ("a private key", r"untrusted comment: [^\n]{0,200}secret key\s"),
    "OpenVPN": ("a shared key", r"-----BEGIN OpenVPN Static key"),
    "PrivateKey": ("a private key", r"(?m:^[ \t]*)PrivateKey[ \t]*=[ \t]*[A-Za-z0-9+/]{42,43}="),
    "PresharedKey": ("a shared key", r"(?m:^[ \t]*)PresharedKey[ \t]*=[ \t]*[A-Za-z0-9+/]{42,43}="),
    "ghp_ gho_ ghu_ ghs_ ghr_": ("a token of GitHub", r"\bgh[a-z]_[A-Za-z0-9]{30}"),
    "github_pat_": ("a token of GitHub", r"\bgithub_pat_\w{22}"),
    "glpat- glptt- gldt- glrt- glcbt- glsoat-": (
        "a token of GitLab",
        r"\bgl[a-z]{2,4}-(?=[\w-]{0,30}\d)[\w-]{20}",
    ),
    "sk-": ("a key of a service", r"(?<![\w-])sk-(?=[\w-]{0,60}\d)(?=[\w-]{0,60}[A-Z])[\w-]{20}"),
    "xai-": ("a key of a service", r"\bxai-(?=[A-Za-z]{0,30}\d)[A-Za-z0-9]{30}"),
    "nvapi-": ("a key of a service", r"\bnvapi-[\w-]{40}"),
    "gsk_": ("a key of a service", r"\bgsk_[A-Za-z0-9]{30}"),
    "hf_": ("a token of a service", r"\bhf_[A-Za-z0-9]{30}"),
    "sk_ rk_": ("a key of a service", r"\b[rs]k_(?:live_|test_)?[A-Za-z0-9]{24}"),
    "whsec_": ("a key of a service", r"\bwhsec_[A-Za-z0-9+/]{24}"),
    "xox": ("a token of Slack", r"\bxox[a-z](?:\.xox[a-z])?-(?=[A-Za-z-]{0,40}\d)[\w-]{10}"),
    "xapp-": ("a token of Slack", r"\bxapp-\d-\w{8}"),
    "AKIA": ("an access key of AWS", r"\bAKIA(?![A-Z0-9]{9}EXAMPLE)[A-Z2-7]{16}\b"),
    "ASIA": ("an access key of AWS", r"\bASIA(?![A-Z0-9]{9}EXAMPLE)(?=[A-Z]{0,15}\d)[A-Z2-7]{16}\b"),
    "AIza": ("a key of Google", r"\bAIza[\w-]{35}"),
    "ya29.": ("a token of Google", r"\bya29\.[\w-]{30}"),
    "GOCSPX-": ("a key of Google", r"\bGOCSPX-[\w-]{20}"),
    "npm_": ("a token of npm", r"\bnpm_[A-Za-z0-9]{36}"),
    "pypi-": ("a token of PyPI", r"\bpypi-(?=[\w-]{0,60}\d)(?=[\w-]{0,60}[A-Z])[\w-]{36}"),
    "dckr_pat_": ("a token of Docker", r"\bdckr_pat_[\w-]{20}"),
    "dop_v1_": ("a token of a service", r"\bdop_v1_[0-9a-f]{32}"),
    "shpat_ shpca_ shppa_ shpss_": ("a token of a service", r"\bshp(?:at|ca|pa|ss)_[0-9a-fA-F]{32}"),
    "lin_api_": ("a key of a service", r"\blin_api_[A-Za-z0-9]{30}"),
    "ATATT3": ("a token of a service", r"\bATATT3[\w=-]{40}"),
    "hvs. hvb. hvr.": ("a token of Vault", r"\bhv[bsr]\.(?=[\w-]{0,40}\d)[\w-]{24}"),
    "tskey-": ("a key of a service", r"\btskey-[a-z]{2,9}-[\w-]{12}"),
    "glsa_": ("a token of a service", r"\bglsa_\w{32}"),
    "SG.": ("a key of a service", r"\bSG\.[\w-]{22}\.[\w-]{43}"),
    "rubygems_": ("a key of RubyGems", r"\brubygems_[0-9a-f]{32}"),
}  # fmt: skip
#: Forms of which source code and documentation have examples.
DATA_FORMS: dict[str, tuple[str, str]] = {
    "eyJ": ("a signed token", r"(?<![\w-])eyJ[\w-]{10,4000}+\.eyJ[\w-]{10,4000}+\.[\w-]{10}"),
    "password": (
        "a password",
        r"(?m:^[ \t]*(?:machine\s+\S{1,200}|default))\s+"
        r"(?:(?:login|account)\s+\S{1,200}\s+){0,2}password\s+\S",
    ),
    ":$": (
        "the hash of a password",
        r"(?m:^[^\s:]{1,64}):\$(?:apr1|2[abxy]|[156y]|argon2\w{1,2}|scrypt)\$\S{8}",
    ),
    '"auth"': ("a login", r'"auth"\s*:\s*"[\w+/=.-]{8}'),
    'token"': ("a login", r'"(?:identity|registry)token"\s*:\s*"[\w+/=.-]{8}'),
    "client-key-data": ("a private key", r"client-key-data\W{1,4}[A-Za-z0-9+/]{20}"),
    "_auth": ("a login", r"_auth(?:Token)?\s*=\s*[^\s$]{6}"),
    "uthorization": (
        "a login",
        r"[Aa]uthorization\W{1,6}(?i:bearer|basic|token)\s+(?=[\w.~+/-]{0,30}\d)[\w.~+/-]{8}",
    ),
    "://": ("a password", r"://[^\s/@:\"'<>]{0,100}:(?P<url>[^\s@/\"'<>]{1,200})@[\w\[]"),
}  # fmt: skip
#: Files that are no text: key stores, keytabs, private keys in DER, which certificates do not look like.
BINARY_FORM = re.compile(
    r"\xfe\xed\xfe\xed\0|\xce\xce\xce\xce\0|\x03\xd9\xa2\x9a[\x65-\x67]\xfb\x4b\xb5|\x05\x02\0\0\0"
    r"|\x30(?:\x81.|\x82..)\x02\x01[\0\x01\x03](?:\x02[\x20-\x84]|\x30|\x04)",
    re.DOTALL,
)
SECRET_WORDS = (
    r"pass(?:word|wd|phrase|code)|(?<![a-z])pass|pwd|secret|token|credentials?"
    r"|(?:api|access|secret|private|signing|encryption|master|account|storage|shared|auth)[_.-]?key"
)
#: A name that ends in such a word, and its value, which ends there. The value is read once (`+`), or a long
#: file of such names would take minutes.
_ASSIGNED = re.compile(
    rf"""(?im)(?:{SECRET_WORDS})(?P<quote>["']?)[ \t]*[:=]>?[ \t]*"""
    r"""["']?(?P<value>[^\s"',;&]{4}[^\s"',;&}#]{0,396}+)["']?[ \t]*(?:[,;&}#]|\r?$)"""
)
#: Values that stand for others, or that are none: variables, versions, paths, types, words of a template.
_PLACEHOLDER = re.compile(
    r"[$%<{\[(*/~]|\.{1,2}/|[\^~><=v]*\d+(?:\.[\dx*]+)+$|\d{1,5}$|x{3,}|.*(?:\{\{|\$\{|\(|<|\.\.\.)|"
    r"(?i:(?:true|false|null|none|nil|undefined|string|str|bytes|int|read|write|optional|required|pass|password|passwd|"
    r"secret|token)$|self\.|this\.|process\.|os\.|your|example|changeme|replace|dummy|"
    r"npm:|workspace:|file:|git\+|https?:)"
)
#: Names of source code and documentation.
_PROSE = re.compile(
    r".*\.(?:py[ciw]?|so(?:\..*)?|[cm]?[jt]sx?|hh?|hpp|c|cc|cpp|cxx|rb|go|rs|p[lm]|java|class|kt|scala|swift|"
    r"php|lua|el|hs|ml|cs|r|jl|m4|cmake|vim|md|rst|html?|xhtml|css|scss|svg|tex|po|pot|map|[1-8]|adoc|texi|"
    r"info|ipynb|lock|sum|diff|patch|csv|tsv)|(?:license|licence|copying|notice|changelog|readme|record|metadata|pkg-info).*",
    re.IGNORECASE,
)
#: Names of files that hold nothing but a hash or a number of a version.
_HASHED = re.compile(
    r".*(?:sha\d|md5|sum$|hash|digest|integrity|revision|version|commit|build.?id|etag)", re.I
)
_RANDOM = re.compile(r"(?=[A-Za-z]{0,100}\d)(?=\d{0,100}[A-Za-z])[A-Za-z0-9]{16,}")
_PGPASS = re.compile(r"(?=[^:]*[A-Za-z.*])[^\s:#]+:(?:\d{2,5}|\*):[^\s:]+:[^\s:]+:\S{3,}")
#: In a variable: a login in an address, an option whose name speaks of a secret, a part of an address that
#: looks random, anything long that does.
_IN_VARIABLE = re.compile(
    r"://\S*@|/t/[\w-]{6}"
    rf"|(?i:(?:{SECRET_WORDS}|pass|pw|auth|sig|signature|key)[\w-]{{0,12}}[=:])[^\s/]"
    rf"|(?i:(?<!\S)-[\w.-]*(?:{SECRET_WORDS}|pass|auth|key)[\w-]{{0,12}})\s+[^\s-]"
    r"|(?=[^\s/]*\d)(?=[^\s/]*[A-Za-z])[A-Za-z0-9+_=-]{32,}"
    r"|[/=?&:](?=[A-Za-z]*\d[A-Za-z]*\d[A-Za-z]*\d)(?=\d*[A-Za-z])[A-Za-z0-9]{16}"
)


def secret_in_file(path: str) -> tuple[str, int]:
    """Say what a file has in it that looks like a secret, or ""; and how many bytes were read.

    Raises OSError for a file that cannot be read, or that is no regular file.
    """
    beginning = _beginning(path)
    return _secret_in_bytes(beginning, os.path.basename(path)), len(beginning)


def secret_in_variable(value: str) -> str:
    """Say what the value of a variable has in it that looks like a secret; empty if nothing does."""
    return secret_in_text(value) or ("a password, token or key" if _IN_VARIABLE.search(value) else "")


def secret_in_text(text: str, name: str = "") -> str:
    """Say what a text has in it that looks like a secret; `name` is that of the file with the text."""
    if found := _form(text, FORMS):
        return found
    if _PROSE.fullmatch(name):
        return ""
    return _form(text, DATA_FORMS) or _assigned(text) or _only_a_token(text, name)


def _beginning(path: str) -> bytes:
    node = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        file = openat2.opened(node)
    finally:
        os.close(node)
    with open(file, "rb", buffering=0) as content:
        beginning = content.read(MOST_BINARY)
        if b"\0" not in beginning or beginning[:2] in (b"\xff\xfe", b"\xfe\xff"):
            beginning += content.read(MOST_TEXT - MOST_BINARY)
    return beginning


def _secret_in_bytes(data: bytes, name: str) -> str:
    text = data.decode("latin-1")
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        text = data.decode("utf-16", "replace")
    elif BINARY_FORM.match(text) and name != "cacerts":  # Java's public certificates
        return "a private key or a key store"
    # UTF-16 without a mark at its beginning; of other binary files the keys with a form of their own count.
    return secret_in_text(text, name) or ("\0" in text and _form(text.replace("\0", ""), FORMS)) or ""


def _form(text: str, forms: dict[str, tuple[str, str]]) -> str:
    for parts, (what, form) in forms.items():
        if not any(part in text for part in parts.split()):
            continue
        for found in re.finditer(form, text):
            login = found.groupdict().get("url")
            if login is None or not _PLACEHOLDER.match(login):
                return what
    return ""


def _assigned(text: str) -> str:
    for found in _ASSIGNED.finditer(text):
        value = found["value"].rstrip("}])")
        # A word after a quoted name is more often a translation, or the title of a field.
        if not _PLACEHOLDER.match(value) and not (found["quote"] and value.isalpha()):
            return "a password, token or key"
    return ""


def _only_a_token(text: str, name: str) -> str:
    """Say that a short file has nothing in it but a token, or the fields of .pgpass."""
    lines = text[:4096].split("\n", 20)
    lines = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if lines and all(_PGPASS.fullmatch(line) for line in lines):
        return "a password"
    if lines and lines[0].startswith("-----BEGIN"):  # a certificate or a public key
        return ""
    random = [line for line in lines if not re.search(r"\s", line) and _RANDOM.search(line)]
    if random and len(lines) <= 3 and len(text) < 4096 and len({*random[0]}) >= 8 and not _HASHED.match(name):
        return "a token"
    return ""
