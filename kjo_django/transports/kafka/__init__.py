"""Apache Kafka, by way of confluent-kafka. The only package that imports it."""

try:
    from kjo_django.transports.kafka.transport import KafkaTransport
except ModuleNotFoundError as error:
    raise ImportError(f"{error}: for Kafka, pip install 'kjo-django[kafka]'") from error

__all__ = ["KafkaTransport"]
