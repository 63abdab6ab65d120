// node follow.js TOPIC_OF_EVENTS CONSUMER_GROUP

import { Kafka } from "kafkajs";
import { readEvent, Refused } from "./kjo.js";

const [topic, groupId] = process.argv.slice(2);
const kafka = new Kafka({ brokers: process.env.KAFKA_BOOTSTRAP_SERVERS.split(",") });
const consumer = kafka.consumer({ groupId });
await consumer.connect();
await consumer.subscribe({ topic, fromBeginning: true });
// Where kafkajs would stop reading and stay, the process ends and is started again.
consumer.on(consumer.events.CRASH, ({ payload }) => payload.restart || process.exit(1));
await consumer.run({
  eachMessage: async ({ message }) => {
    try {
      const event = readEvent(message, { ORDER_PAID: ["1"] });
      if (event) console.log(`${event.data.order} is paid by ${event.key}`);
    } catch (error) {
      if (!(error instanceof Refused)) throw error; // read again
      console.log(`refused: ${error.reason}`);
    }
  },
});
