// node enqueue.js TOPIC_OF_JOBS TOPIC_OF_EVENTS ORDER

import { Kafka } from "kafkajs";
import { event, job } from "./kjo.js";

const [jobs, events, order] = process.argv.slice(2);
const kafka = new Kafka({ brokers: process.env.KAFKA_BOOTSTRAP_SERVERS.split(",") });
const producer = kafka.producer();
await producer.connect();
const mail = { id: `mail-${order}`, type: "shop.mail", arguments: { order }, key: order };
await producer.send({ topic: jobs, messages: [job(mail)] });
const paid = { id: `paid-${order}`, type: "ORDER_PAID", source: "checkout", data: { userId: "u7", order } };
await producer.send({ topic: events, messages: [event(paid)] });
await producer.disconnect();
