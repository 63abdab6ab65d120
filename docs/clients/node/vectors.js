// node vectors.js DIRECTORY_OF_VECTORS
//
// Reads and writes every vector of docs/reference/protocol with kjo.js. Prints how many of each
// kind it has read and written; fails and names those that differ.

import { readFileSync } from "node:fs";
import { isDeepStrictEqual } from "node:util";
import { counter, decide, event, job, readEvent, readJob, Refused } from "./kjo.js";

const [directory] = process.argv.slice(2);
const ENVELOPE = ["kjo-id", "kjo-type"];
const DEFAULTS = { service: "", generation: 1, attempt: 1, replay_count: 0, job_id: null };
let failures = 0;

// --- Records as the vectors have them ---------------------------------------------------------

function bytes(given) {
  if (given === null) return null;
  return typeof given === "object" ? Buffer.from(given.base64, "base64") : Buffer.from(given);
}

/** Headers as kafkajs has them: those of one name in an array. */
function received(pairs) {
  const headers = {};
  for (const [name, value] of pairs) {
    headers[name] = name in headers ? [headers[name], bytes(value)].flat() : bytes(value);
  }
  return headers;
}

function recordOf(given) {
  return {
    ...given,
    key: bytes(given.key),
    value: bytes(given.value),
    timestamp: Date.parse(given.timestamp),
    headers: received(given.headers),
  };
}

/** What two records are compared by: values in JSON as what they mean, headers in no order. */
function comparable({ key, value, headers }) {
  const hex = (one) => (one == null ? null : Buffer.from(one).toString("hex"));
  let body;
  try {
    body = JSON.parse(value);
  } catch {
    body = hex(value);
  }
  const named = Object.entries(headers).map(([name, one]) => [name, [one].flat().map(hex)]);
  return { key: hex(key), body, headers: Object.fromEntries(named) };
}

// --- Reading ------------------------------------------------------------------------------------

function readJobVector(record) {
  const { jobId, replayCount, contentType, ...same } = readJob(record);
  return { ...same, job_id: jobId, replay_count: replayCount, content_type: contentType };
}

const READERS = {
  job: readJobVector,
  "dead-letter": readJobVector,
  replay: readJobVector,
  event: (record) => readEvent(record, { USER_RENAMED: ["1"] }) ?? { passed_over: true },
  kdlq: ({ headers }) => ({
    KDLQ_Redelivered: counter(headers, "KDLQ_Redelivered"),
    KDLQ_Kills: counter(headers, "KDLQ_Kills"),
  }),
};

function read(kind, record) {
  try {
    return READERS[kind](recordOf(record));
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    return { refused: error.reason };
  }
}

function expected({ message, error }) {
  // A reader may leave out MessagePack; to it that is a content type it does not know.
  if (message?.content_type === "application/msgpack") return { refused: "deserialization" };
  return error ? { refused: error.reason } : message;
}

// --- Writing ------------------------------------------------------------------------------------

/** Whether a service that stores no jobs sends this: each header once, none of a stored job's. */
function isOfAnotherService({ message, record, conforms }) {
  const names = record.headers.map(([name]) => name);
  const isPlain = Object.entries(DEFAULTS).every(([name, value]) => message?.[name] === value);
  return conforms && isPlain && new Set(names).size === names.length;
}

function writeJob({ message, record }) {
  const others = record.headers.filter(([name]) => !ENVELOPE.includes(name));
  return job({ ...message, key: record.key, headers: received(others) });
}

function writeKdlq({ given }) {
  const { dlq_topic, redelivery_topic, max_redeliveries, max_kills, informational_headers } = given.config;
  const config = {
    consumer: given.consumer,
    dlqTopic: dlq_topic,
    redeliveryTopic: redelivery_topic,
    maxRedeliveries: max_redeliveries,
    maxKills: max_kills,
    informationalHeaders: informational_headers,
  };
  const error = given.error && { name: "kjo_django.exceptions.PermanentError", message: given.error };
  return decide(recordOf(given.record), given.answer, config, error, Date.parse(given.now));
}

function written(kind, vector) {
  if (kind === "job") return isOfAnotherService(vector) ? { record: writeJob(vector) } : null;
  if (!vector.given) return null;
  if (kind === "event") return { record: event(vector.given.event, vector.given.headers) };
  return kind === "kdlq" ? writeKdlq(vector) : null;
}

// --- All vectors --------------------------------------------------------------------------------

function check(name, found, wanted) {
  if (isDeepStrictEqual(found, wanted)) return;
  failures += 1;
  console.log(`${name}:\n  found  ${JSON.stringify(found)}\n  wanted ${JSON.stringify(wanted)}`);
}

for (const kind of Object.keys(READERS)) {
  const { vectors } = JSON.parse(readFileSync(`${directory}/${kind}.vectors.json`));
  const counts = { read: 0, written: 0 };
  for (const vector of vectors) {
    if (vector.record) {
      check(`${kind}: ${vector.name}, read`, read(kind, vector.record), expected(vector));
      counts.read += 1;
    }
    const found = written(kind, vector);
    if (found) {
      check(`${kind}: ${vector.name}, status`, found.status, vector.status);
      const [ours, theirs] = [found.record, vector.record && recordOf(vector.record)];
      const topic = found.record?.topic ?? vector.record?.topic; // jobs and events: the sender's
      check(`${kind}: ${vector.name}, topic`, topic, vector.record?.topic);
      check(`${kind}: ${vector.name}, written`, ours && comparable(ours), theirs && comparable(theirs));
      counts.written += 1;
    }
  }
  console.log(`${kind}: ${counts.read} read, ${counts.written} written`);
}
process.exitCode = failures ? 1 : 0;
