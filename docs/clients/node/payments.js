// node payments.js TOPIC REDELIVERY_TOPIC DEAD_LETTER_TOPIC CONSUMER_GROUP

import { Kafka } from "kafkajs";
import { accept, MUST_BE_REDELIVERED, OK } from "./kjo.js";

function book({ value }) {
  const { state } = JSON.parse(value);
  if (state === "unknown") throw new Error("no such account"); // kills it
  return state === "pending" ? MUST_BE_REDELIVERED : OK;
}

const [from, redeliveryTopic, dlqTopic, groupId] = process.argv.slice(2);
const config = { consumer: groupId, redeliveryTopic, dlqTopic, maxRedeliveries: 4, maxKills: 3 };
const kafka = new Kafka({ brokers: process.env.KAFKA_BOOTSTRAP_SERVERS.split(",") });
const producer = kafka.producer();
const consumer = kafka.consumer({ groupId });
await Promise.all([producer.connect(), consumer.connect()]);
await consumer.subscribe({ topics: [from, dlqTopic], fromBeginning: true });
// Where kafkajs would stop reading and stay, the process ends and is started again.
consumer.on(consumer.events.CRASH, ({ payload }) => payload.restart || process.exit(1));
await consumer.run({
  eachMessage: async ({ topic, partition, message }) => {
    const { status, record } = await accept({ topic, partition, ...message }, book, config);
    // Before the offset is committed, so that a crash loses nothing.
    if (record) await producer.send({ topic: record.topic, messages: [record] });
    console.log(`${status} ${message.key}`);
  },
});
