// Jobs, events and KDLQ messages of kjo_django, as kafkajs sends and receives them.
// The rules are those of docs/reference/protocol.md; vectors.js checks them.

import { randomUUID } from "node:crypto";

/** A record that no retry can make readable; `reason` is that of its dead letter. */
export class Refused extends Error {
  constructor(reason, message) {
    super(message);
    this.reason = reason;
  }
}

const MOST = 2 ** 31 - 1;

/** The bytes of a header, or undefined. Of a name given more than once the last counts. */
function header(headers, name) {
  const value = headers?.[name];
  const last = Array.isArray(value) ? value.at(-1) : value;
  return last == null ? undefined : Buffer.from(last);
}

function text(headers, name, otherwise = "") {
  return header(headers, name)?.toString() ?? otherwise;
}

function number(headers, name, otherwise) {
  const found = text(headers, name);
  return /^[0-9]{1,19}$/.test(found) && Number(found) <= MOST ? Number(found) : otherwise;
}

function identifier(headers, name, limit) {
  const bytes = header(headers, name);
  if (!bytes?.length) throw new Refused("invalid", `The message has no ${name} header`);
  const found = decoded(bytes, "invalid");
  if (length(found) > limit || found.includes("\0")) {
    throw new Refused("invalid", `The ${name} header is not a usable identifier`);
  }
  return found;
}

function length(found) {
  return [...found].length; // characters, not units of UTF-16
}

function decoded(bytes, reason) {
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
  } catch {
    throw new Refused(reason, "Not valid UTF-8");
  }
}

function parsed(bytes) {
  try {
    return JSON.parse(decoded(bytes, "deserialization"));
  } catch (error) {
    throw error instanceof Refused ? error : new Refused("deserialization", error.message);
  }
}

// --- Jobs -----------------------------------------------------------------------------------------

/**
 * The message of a job for a worker.
 * `id` identifies its effects: whoever sends it again, sends the same id, and it runs once.
 */
export function job({ id, type, arguments: values, key = null, headers = {} }) {
  return {
    key,
    value: JSON.stringify(values),
    headers: { ...headers, "kjo-id": id, "kjo-type": type },
  };
}

/** Read a job's message, its dead letter or its replay; throws Refused. */
export function readJob({ value, headers }) {
  if (!value?.length) throw new Refused("invalid", "The message has no value");
  const jobId = text(headers, "kjo-job-id");
  if (length(jobId) > 200 || jobId.includes("\0")) {
    throw new Refused("invalid", "The kjo-job-id header is not a usable identifier");
  }
  const message = {
    id: identifier(headers, "kjo-id", 200),
    type: identifier(headers, "kjo-type", 100),
    jobId: jobId || null,
    service: text(headers, "kjo-service"),
    generation: number(headers, "kjo-generation", 1),
    attempt: number(headers, "kjo-attempt", 1),
    replayCount: number(headers, "kjo-replay-count", 0),
    contentType: text(headers, "content-type", "application/json"),
  };
  if (message.contentType.split(";")[0].trim().toLowerCase() !== "application/json") {
    throw new Refused("deserialization", `${message.contentType} is not read here`);
  }
  return { ...message, arguments: parsed(value) };
}

// --- Events ---------------------------------------------------------------------------------------

/** The message of an event; throws Refused if it is not a valid one. */
export function event(given, headers = {}) {
  for (const name of ["subject", "dataschema"]) {
    if (given[name] != null) filled(name, given[name], 1000);
  }
  const { key, ...sent } = checked({
    id: randomUUID(),
    timestamp: Date.now(),
    data: {},
    ...given,
  });
  const told = {
    ...headers,
    "content-type": "application/json",
    "event-id": sent.id,
    "event-type": sent.type,
    "event-source": sent.source,
    "event-version": sent.version,
  };
  const correlation = sent.metadata?.correlationId;
  if (correlation !== undefined) told["correlation-id"] = correlation;
  return { key, value: JSON.stringify(sent), headers: told };
}

/**
 * Read an event; null for one of a type that is not handled, valid or not.
 * `handled` has the versions that are understood of each type, such as `{ ORDER_PAID: ["1"] }`.
 * Throws Refused.
 */
export function readEvent({ value }, handled) {
  if (value == null) throw new Refused("invalid", "The event has no value");
  const given = parsed(value);
  if (!isObject(given)) throw new Refused("invalid", "An event must be an object");
  const type = given.type;
  if (typeof type === "string" && type && !Object.hasOwn(handled, type)) return null;
  const found = checked(given);
  if (!handled[type].includes(found.version)) {
    throw new Refused("invalid", `Version ${found.version} of ${type} is not understood here`);
  }
  return found;
}

function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function checked(given) {
  const { timestamp, data } = given;
  if (!Number.isInteger(timestamp) || timestamp <= 0 || timestamp > 253402300799999) {
    throw new Refused("invalid", "timestamp must be milliseconds of Unix time");
  }
  if (!isObject(data)) throw new Refused("invalid", "data must be an object");
  const found = {
    id: filled("id", given.id, 255),
    type: filled("type", given.type, 100),
    source: filled("source", given.source, 100),
    timestamp,
    version: version(given.version ?? "1"),
    data,
  };
  for (const name of ["subject", "dataschema"]) {
    // Readers of version 1.0 ignored these whatever they held.
    if (isFilled(given[name], 1000)) found[name] = given[name];
  }
  if (given.metadata != null) found.metadata = metadata(given.metadata);
  const user = found.metadata?.userId ?? asText(data.userId ?? data.user_id);
  return { ...found, key: typeof user === "string" && user ? user : found.id };
}

function isFilled(value, limit) {
  const isText = typeof value === "string" && value.trim() && !value.includes("\0");
  return isText && length(value) <= limit;
}

function filled(name, value, limit) {
  if (!isFilled(value, limit)) {
    throw new Refused("invalid", `${name} must be text of 1 to ${limit} characters`);
  }
  return value;
}

/** A version as it is compared: `1`, `"1"`, `"v1"` and `"1.0"` are equal. */
function version(value) {
  const found = filled("version", typeof value === "number" ? String(value) : value, 50).trim();
  const digits = /^[vV]?(\d+(?:\.\d+)*)$/.exec(found);
  return digits ? digits[1].replace(/(?:\.0+)+$/, "") : found;
}

const SPELLINGS = {
  correlationId: "correlation_id",
  causationId: "causation_id",
  userId: "user_id",
};

function metadata(given) {
  if (!isObject(given)) throw new Refused("invalid", "metadata must be an object");
  const names = Object.entries(SPELLINGS).flat();
  const found = Object.fromEntries(Object.entries(given).filter(([name]) => !names.includes(name)));
  for (const [camel, snake] of Object.entries(SPELLINGS)) {
    const value = asText(given[camel] ?? given[snake]);
    if (value != null) found[camel] = filled(`metadata.${camel}`, value, 255);
  }
  return found;
}

function asText(value) {
  return Number.isInteger(value) ? String(value) : value;
}

// --- KDLQ -----------------------------------------------------------------------------------------

export const OK = "OK";
export const MUST_BE_REDELIVERED = "MUST_BE_REDELIVERED";
export const ERROR = "ERROR";

const REDELIVERED = "KDLQ_Redelivered";
const KILLS = "KDLQ_Kills";

/** A counter of KDLQ; what is no number of four bytes, or negative, counts as 0. */
export function counter(headers, name) {
  const value = header(headers, name);
  return value?.length === 4 ? Math.max(0, value.readInt32BE()) : 0;
}

/**
 * Process a record and decide what becomes of it, see `decide`. `process` takes the record and
 * answers with OK, MUST_BE_REDELIVERED or ERROR; what it throws kills the record.
 */
export async function accept(record, process, config) {
  let answer;
  let error = null;
  try {
    answer = await process(record);
  } catch (thrown) {
    answer = ERROR;
    error = thrown;
  }
  return decide(record, answer, config, error);
}

/**
 * What becomes of a record that was answered with OK, MUST_BE_REDELIVERED or ERROR: a `status`, and
 * the `record` to send before the offset is committed, or null.
 * `config`: consumer, dlqTopic, and optionally redeliveryTopic, maxRedeliveries, maxKills (-1: no
 * limit), informationalHeaders. `error`: has name and message.
 */
export function decide(record, answer, config, error = null, now = Date.now()) {
  const { maxRedeliveries = -1, maxKills = -1 } = config;
  const { topic, key, value } = record;
  const redelivered = counter(record.headers, REDELIVERED);
  const kills = counter(record.headers, KILLS);
  if (answer === OK) return { status: "OK", record: null };
  const headers = kept(record, config);
  if (
    answer === MUST_BE_REDELIVERED &&
    (maxRedeliveries < 0 || redelivered < maxRedeliveries)
  ) {
    headers[REDELIVERED] = int(redelivered + 1);
    const again = config.redeliveryTopic ?? topic;
    return { status: "REDELIVERED", record: { topic: again, key, value, headers } };
  }
  if (0 <= maxKills && maxKills <= kills) {
    return { status: "SKIPPED_DLQ_MAX_ATTEMPTS_REACHED", record: null };
  }
  headers[KILLS] = int(kills + 1);
  headers.KDLQ_FailedAt = long(now);
  delete headers.KDLQ_ErrorClass;
  delete headers.KDLQ_ErrorMessage;
  if (error) {
    headers.KDLQ_ErrorClass = error.name;
    headers.KDLQ_ErrorMessage = [...error.message].slice(0, 500).join("");
  }
  return { status: "ROUTED_TO_DLQ", record: { topic: config.dlqTopic, key, value, headers } };
}

/** The record's headers, with what tells of the origin where that is not there yet. */
function kept({ topic, partition, offset, timestamp, headers }, config) {
  const origin = { KDLQ_OrigTopic: topic };
  if (config.informationalHeaders) {
    origin.KDLQ_OrigOffset = long(offset);
    origin.KDLQ_OrigPartition = int(partition);
    origin.KDLQ_OrigTs = long(timestamp);
  }
  // kafkajs cannot send a header without a value, so that one gets an empty value.
  const given = Object.entries(headers ?? {}).map(([name, value]) => [
    name,
    Array.isArray(value) ? value.map((one) => one ?? "") : (value ?? ""),
  ]);
  return { ...origin, ...Object.fromEntries(given), KDLQ_PrcMarker: config.consumer };
}

function int(value) {
  const bytes = Buffer.alloc(4);
  bytes.writeInt32BE(Math.min(value, MOST)); // a counter stays at the largest value
  return bytes;
}

function long(value) {
  const bytes = Buffer.alloc(8);
  bytes.writeBigInt64BE(BigInt(value));
  return bytes;
}
