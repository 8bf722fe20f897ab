/** Every text of the page. Another language is another file like this one. */

const number = new Intl.NumberFormat("en");
const short = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });

export function count(value: number): string {
  return number.format(value);
}

function plural(value: number, one: string, many = `${one}s`): string {
  return `${number.format(value)} ${value === 1 ? one : many}`;
}

export function bytes(value: number): string {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (value >= 1024 && at < units.length - 1) {
    value /= 1024;
    at += 1;
  }
  return `${short.format(value)} ${units[at]}`;
}

const LONGEST = 36;

/** A name cut in its middle: both ends of a name tell it from others. */
export function middle(name: string, longest = LONGEST): string {
  const letters = [...name];
  if (letters.length <= longest) return name;
  const end = Math.floor((longest - 1) / 2);
  return `${letters.slice(0, longest - 1 - end).join("")}…${letters.slice(-end).join("")}`;
}

export function seconds(value: number): string {
  return value < 1 ? `${Math.round(value * 1000)} ms` : `${short.format(value)} s`;
}

export function when(value: number): string {
  const date = new Date(value * 1000);
  const today = new Date().toDateString() === date.toDateString();
  return today
    ? date.toLocaleTimeString("en", { hour: "2-digit", minute: "2-digit" })
    : date.toLocaleDateString("en", { year: "numeric", month: "short", day: "numeric" });
}

export const texts = {
  title: "perdure",
  nav: {
    label: "Main",
    talk: "Conversation",
    newConversation: "New conversation",
    sessions: "Sessions",
    machine: "Machine",
    usage: "Usage",
    recent: "Recent conversations",
    menu: "Menu",
    theme: "Colours",
    themes: { auto: "As the system", light: "Light", dark: "Dark" },
    skip: "Skip to the conversation",
  },
  key: {
    title: "This server needs a key",
    label: "Key",
    wrong: "The server does not know this key.",
    note: "It is kept until this tab is closed, and nowhere else.",
    use: "Use this key",
    change: "Change key",
  },
  composer: {
    label: "Message",
    placeholder: "Write a message",
    send: "Send",
    stop: "Stop",
    stopping: "Stopping",
    attach: "Attach a text file",
    detach: (name: string) => `Remove ${name}`,
    notText: (name: string) => `${name} is not a text file`,
    tooLarge: (name: string, limit: string) => `${name} is larger than ${limit}`,
    keys: "Enter sends, Shift+Enter starts a line, Escape stops",
  },
  talk: {
    empty: "Say something to begin.",
    earlier: "Show earlier turns",
    you: "You",
    model: "Model",
    system: "System message",
    tool: (name: string) => (name ? `Result of ${name}` : "Tool result"),
    fold: "Earlier turns were folded into a summary",
    dropped: (many: number) => `${plural(many, "message")} at the start did not fit and were left out`,
    reasoning: (words: number) => `Reasoning, ${plural(words, "word")}`,
    thinking: "Reasoning",
    call: (name: string) => `Calls ${name}`,
    arguments: "Arguments",
    result: "Result",
    answerCall: "Send the result",
    copy: "Copy",
    copied: "Copied",
    copyCode: "Copy code",
    edit: "Edit",
    editReply: "Change the reply",
    save: "Send as a new branch",
    saveReply: "Continue from this text in a new branch",
    cancel: "Cancel",
    regenerate: "Regenerate",
    continue: "Continue",
    fork: "Fork from here",
    remember: "Remember",
    siblings: (at: number, of: number) => `Branch ${at} of ${of}`,
    previous: "Previous branch",
    next: "Next branch",
    tokens: "Tokens",
    turnLabel: (turn: number) => `Turn ${turn}`,
    endings: {
      length: "Cut at the length limit",
      cancelled: "Stopped",
      error: "Ended by an error",
      tool_calls: "Waits for a tool result",
      stop: "",
    } as Record<string, string>,
    waiting: "Waiting for the first token",
    lost: "The connection was lost. This reply was not kept.",
    brokeOff: (why: string) => `The reply broke off: ${why}`,
    full: "The conversation no longer fits into the context. Send the message again and:",
    slashed:
      "This conversation has a slash in its name, which no address can have. `perdure sessions` and the library still open it, and fork it under another name.",
    by: (model: string) => `Model: ${model}`,
    notKept: (why: string) => `This turn was not kept: ${why}`,
    failed: (why: string) => `No reply: ${why}`,
    again: "Send again",
    onward: "Continue from here",
    dismiss: "Dismiss",
    busyElsewhere: "This conversation is being answered elsewhere. It will show here when it is done.",
    gone: "This conversation was deleted.",
    tools: "Conversation tools",
    forkTitle: "Fork this conversation",
    rememberTitle: "Remember this point",
    name: "Name",
    label: "Label",
    note: "Note",
    make: "Fork",
    keep: "Remember",
  },
  usage: {
    title: "Usage",
    note: "By key and day of UTC, for 31 days. A key sees its own; a key of the namespace metrics sees all.",
    none: "No key was used yet, or the server needs none.",
    columns: { day: "Day", key: "Key", requests: "Requests", prompt: "Prompt tokens", cached: "From cache", written: "Written tokens", left: "Left of the day" },
    share: (part: number, whole: number) => (whole ? `${Math.round((100 * part) / whole)}%` : ""),
    unlimited: "no limit",
  },
  reuse: {
    label: "Where the prompt came from",
    slot: "slot",
    memory: "memory",
    disk: "disk",
    shared: "shared store",
    computed: "computed",
    part: (tokens: number, where: string) => `${count(tokens)} ${where}`,
    first: (value: number) => `first token ${seconds(value)}`,
    speed: (value: number) => `${short.format(value)} tokens/s`,
    written: (value: number) => plural(value, "token") + " written",
    guessed: (guesses: number, right: number) => `${count(guesses)} guessed, ${count(right)} right`,
    forced: (value: number) => `${count(value)} forced by the grammar`,
    why: (text: string) => `Why not more was reused: ${text}`,
  },
  tokens: {
    label: "Tokens of the reply, coloured by surprise",
    probability: (value: number) => `${short.format(value * 100)}%`,
    alternatives: "Other tokens here",
    branch: (text: string) => `Branch with ${JSON.stringify(text)}`,
    legend: "expected … surprising",
    along: "Surprise along the reply",
    bits: (value: number) => `${short.format(value)} bits`,
  },
  tree: {
    title: "Branches",
    show: "Show branches",
    hide: "Hide branches",
    start: "Start",
    more: (turns: number) => `${plural(turns, "more turn")}`,
    memory: (label: string) => `Memory: ${label}`,
    wake: (label: string) => `Open ${label} as a new conversation`,
    compare: "Compare",
    compareWith: (name: string) => `Compare with ${name}`,
    remove: (name: string) => `Delete branch ${name}`,
    branches: "Conversations in this tree",
    empty: "Editing, regenerating and forking make branches. They show here.",
  },
  compare: {
    title: "Compare two branches",
    common: (turns: number) => `${plural(turns, "turn")} in common`,
    back: "Back",
    nothing: "Both are the same.",
    ends: "ends here",
  },
  settings: {
    title: "Settings of this conversation",
    open: "Settings",
    system: "System message",
    systemFixed: "It was chosen when the conversation began. A new conversation can have another.",
    adapter: "Adapter",
    usualAdapter: "As the server has it",
    sampling: "Sampling",
    further: "Further settings",
    biases: "TOKEN=NUMBER, one a line",
    options: { max_tokens: "Longest reply in tokens" } as Record<string, string>,
    stop: "Stop texts, one a line",
    context: "Context and reasoning",
    overflow: "When the conversation no longer fits",
    overflows: {
      "": "As the server has it",
      error: "Say so",
      drop_oldest: "Leave out the oldest messages",
      shift: "Shift while writing",
      fold: "Fold into a summary",
    } as Record<string, string>,
    reasoning: "Reasoning",
    reasonings: { "": "Folded away", show: "In the text", hide: "Hidden" } as Record<string, string>,
    reasoning_budget: "Tokens to reason for",
    output: "Structured output",
    outputs: { text: "Free text", json: "Any JSON object", schema: "JSON by a schema", regex: "By a pattern" } as Record<
      string,
      string
    >,
    schema: "JSON schema",
    regex: "Regular expression",
    tools: "Tools, as a JSON list",
    format: "Format",
    logprobs: "Token probabilities",
    logprobsNote: "Replies show how likely each token was. It makes them a little larger to send.",
    notJson: (why: string) => `This is no JSON: ${why}`,
    close: "Done",
    placeholder: "default",
  },
  sessions: {
    title: "Sessions",
    search: "Search names and text",
    none: "There are no sessions yet.",
    noneFound: "Nothing has this in its name or text.",
    columns: { name: "Name", model: "Model", turns: "Turns", tokens: "Tokens", changed: "Changed", from: "From", state: "State", size: "On disk", actions: "Actions" },
    origin: (how: string, session: string | null) =>
      session === null ? how : ({ fork: `fork of ${session}`, wake: `woken from ${session}`, import: `import of ${session}`, fold: `folded from ${session}` } as Record<string, string>)[how] ?? `${how} of ${session}`,
    awake: "awake",
    asleep: "asleep",
    cold: "not computed",
    sleep: (name: string) => `Sleep ${name}`,
    wake: (name: string) => `Wake ${name}`,
    exports: (name: string) => `Export ${name}`,
    remove: (name: string) => `Delete ${name}`,
    verbs: { sleep: "Sleep", wake: "Wake", export: "Export", remove: "Delete" },
    plan: (tokens: number, from: string, size: string, computed: number) =>
      `${count(tokens)} tokens${from ? ` from ${from}` : ""}${size ? `, ${size} to read` : ""}; ${count(computed)} to compute`,
    planTitle: (name: string) => `Wake ${name}`,
    planGo: "Wake now",
    woken: (name: string, reused: number) => `${name} is awake, ${plural(reused, "token")} restored`,
    slept: (name: string) => `${name} is asleep`,
    import: "Import a session",
    drop: "Drop an exported session here, or choose a file",
    imported: (name: string) => `Imported ${name}`,
    leftOut: (what: string, why: string) => `${what} not taken: ${why}`,
    deleted: (name: string) => `Deleted ${name}`,
    undo: "Undo",
    more: "Show more",
  },
  machine: {
    title: "Machine",
    models: "Models",
    catalogue: "Models to choose from",
    catalogueNote: "`perdure pull NAME` on the server's machine fetches one, `perdure serve NAME` serves it.",
    catalogueColumns: { name: "Name", fit: "Fits", size: "Size", memory: "Memory", context: "Context", purpose: "Good for", licence: "Licence" },
    fits: { fits: "fits", tight: "tight", not: "does not fit" } as Record<string, string>,
    best: "best here",
    served: "served now",
    state: "State",
    restarts: "Engine restarts",
    architecture: "Architecture",
    size: "Size",
    context: "Context",
    contextTokens: (tokens: number) => `${count(tokens)} tokens a request`,
    kvType: "K/V type",
    devices: "Devices",
    slots: "Slots",
    waiting: "Waiting",
    slot: (at: number) => `Slot ${at}`,
    busy: "busy",
    idle: "idle",
    empty: "empty",
    others: "another's",
    holds: (tokens: number) => plural(tokens, "token"),
    cache: "Kept prefixes",
    cacheNote: "State that is kept in blocks, as a tree of shared beginnings.",
    cacheEmpty: "Nothing is kept in blocks yet: what fits is still in the slots.",
    follow: (text: string) => `Show what follows ${JSON.stringify(text)}`,
    report: "What the cache saved",
    reportSince: (requests: number, since: string) => `${plural(requests, "request")} since ${since}.`,
    reportReused: (tokens: number, share: string) => `${count(tokens)} tokens were not computed again${share}`,
    reportSaved: (time: string) => `about ${time} of reading`,
    reportBars: "Tokens of prompts",
    reused: "reused",
    computed: "computed",
    reportWeek: "The last seven days",
    weekColumns: {
      day: "Day (UTC)",
      bar: "Reused",
      requests: "Requests",
      reused: "Tokens reused",
      computed: "Computed",
      saved: "Time saved",
      written: "Written",
    },
    reportMisses: "Computed again",
    reportNone: "Nothing was computed again.",
    missColumns: { cause: "Cause", client: "Client", tokens: "Tokens" },
    requests: "Last requests",
    requestsNone: "No request was answered yet.",
    columns: { when: "When", session: "Session", reused: "Reused", computed: "Computed", first: "First token", speed: "Tokens/s", why: "Why not more" },
    plots: "Over time",
    plotSpeed: "Tokens a second",
    plotFirst: "First token after",
    plotBusy: "Busy slots",
    plotQueue: "Waiting requests",
    plotOf: (name: string, last: string, most: string) => `${name}: ${last} now, at most ${most}`,
    version: (version: string) => `perdure ${version}`,
    noAnswer: "The server does not answer. It is asked again.",
  },
  shortcuts: {
    title: "Keyboard",
    open: "Keyboard shortcuts",
    list: [
      ["Enter", "Send the message"],
      ["Shift+Enter", "A new line"],
      ["Escape", "Stop the reply"],
      ["Alt+N", "New conversation"],
      ["Alt+B", "Show or hide branches"],
      ["Alt+S", "Sessions"],
      ["Alt+M", "Machine"],
      ["Alt+C", "Back to the message box"],
      ["Alt+comma", "Settings"],
      ["Up, Down", "Between turns, when one is focused"],
      ["Left, Right", "Step through the branches of the focused turn"],
      ["E, R, F, M", "Edit, regenerate, fork, remember the focused turn"],
      ["?", "This list"],
    ] as [string, string][],
  },
  errors: {
    network: "The server cannot be reached.",
    trying: "The server cannot be reached. Trying again…",
    clipboard: "The browser copies nothing here: open the page on this machine, or by https.",
    unexpected: (status: number) => `The server answered with status ${status}.`,
  },
};
