import com.fasterxml.jackson.databind.ObjectMapper;
import java.math.BigInteger;
import java.nio.ByteBuffer;
import java.time.Duration;
import java.util.List;
import java.util.Map;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.header.Headers;
import org.apache.kafka.common.header.internals.RecordHeaders;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/**
 * A consumer that writes headers as the Java library KDLQ does: each hop adds its headers to those
 * that are there, so that a name is given many times, and nothing tells of the origin or the error.
 *
 * <p>java AppendingConsumer.java TOPIC REDELIVERY_TOPIC DEAD_LETTER_TOPIC CONSUMER_GROUP
 */
public final class AppendingConsumer {
    private static final int MOST_REDELIVERIES = 4;
    private static final int MOST_KILLS = 3;

    public static void main(String[] arguments) throws Exception {
        String from = arguments[0], again = arguments[1], dlq = arguments[2], group = arguments[3];
        String brokers = System.getenv("KAFKA_BOOTSTRAP_SERVERS");
        Map<String, Object> common = Map.of("bootstrap.servers", brokers);
        Map<String, Object> reading =
                Map.of(
                        "bootstrap.servers", brokers,
                        "group.id", group,
                        "auto.offset.reset", "earliest",
                        "enable.auto.commit", false);
        var bytes = new ByteArraySerializer();
        var read = new ByteArrayDeserializer();
        try (var producer = new KafkaProducer<>(common, bytes, bytes);
                var consumer = new KafkaConsumer<>(reading, read, read)) {
            consumer.subscribe(List.of(from, dlq));
            while (true) {
                for (var record : consumer.poll(Duration.ofSeconds(1))) {
                    var state = new ObjectMapper().readTree(record.value()).get("state").asText();
                    String status = "OK";
                    int redelivered = counter(record.headers(), "KDLQ_Redelivered");
                    int kills = counter(record.headers(), "KDLQ_Kills");
                    if (state.equals("pending") && redelivered < MOST_REDELIVERIES) {
                        status = "REDELIVERED";
                        producer.send(next(record, again, "KDLQ_Redelivered", redelivered, group)).get();
                    } else if (!state.equals("booked") && kills < MOST_KILLS) {
                        status = "ROUTED_TO_DLQ";
                        producer.send(next(record, dlq, "KDLQ_Kills", kills, group)).get();
                    } else if (!state.equals("booked")) {
                        status = "SKIPPED_DLQ_MAX_ATTEMPTS_REACHED";
                    }
                    System.out.println(status + " " + new String(record.key()));
                }
                consumer.commitSync();
            }
        }
    }

    private static int counter(Headers headers, String name) {
        var last = headers.lastHeader(name);
        return last == null ? 0 : new BigInteger(last.value()).intValueExact();
    }

    private static ProducerRecord<byte[], byte[]> next(
            ConsumerRecord<byte[], byte[]> record, String topic, String counter, int count, String id) {
        var headers = new RecordHeaders(record.headers());
        headers.add(counter, ByteBuffer.allocate(4).putInt(count + 1).array());
        headers.add("KDLQ_PrcMarker", id.getBytes());
        return new ProducerRecord<>(topic, null, record.key(), record.value(), headers);
    }
}
