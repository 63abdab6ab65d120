"""Apache Kafka, by way of confluent-kafka. The only package that imports it."""

from kjo_django.transports.kafka.transport import KafkaTransport

__all__ = ["KafkaTransport"]
