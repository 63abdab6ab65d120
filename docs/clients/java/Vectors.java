import com.fasterxml.jackson.databind.DeserializationFeature;
import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.time.OffsetDateTime;
import java.util.HashSet;
import java.util.HexFormat;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.Optional;
import java.util.Set;
import java.util.TreeMap;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.header.Headers;
import org.apache.kafka.common.header.internals.RecordHeaders;
import org.apache.kafka.common.record.TimestampType;

/**
 * java Vectors DIRECTORY_OF_VECTORS
 *
 * <p>Reads and writes every vector of docs/reference/protocol with Kjo.java. Prints how many of each
 * kind it has read and written; fails and names those that differ.
 */
public final class Vectors {
    private static final ObjectMapper JSON =
            new ObjectMapper().enable(DeserializationFeature.FAIL_ON_TRAILING_TOKENS);
    private static final Set<String> ENVELOPE = Set.of("kjo-id", "kjo-type");
    private static int failures = 0;

    public static void main(String[] arguments) throws Exception {
        for (String kind : List.of("job", "dead-letter", "replay", "event", "kdlq")) {
            int read = 0;
            int written = 0;
            Path file = Path.of(arguments[0], kind + ".vectors.json");
            for (JsonNode vector : JSON.readTree(file.toFile()).get("vectors")) {
                String name = kind + ": " + vector.get("name").textValue();
                JsonNode record = vector.get("record");
                if (record.isObject()) {
                    check(name + ", read", read(kind, record), expected(vector));
                    read += 1;
                }
                Optional<Kjo.Decision> decision = written(kind, vector);
                if (decision.isPresent()) {
                    var found = decision.get();
                    JsonNode status = vector.path("status");
                    if (!status.isMissingNode()) {
                        check(name + ", status", found.status().name(), status.textValue());
                    }
                    check(name + ", written", comparable(found.record()), comparable(record));
                    written += 1;
                }
            }
            System.out.println(kind + ": " + read + " read, " + written + " written");
        }
        System.exit(failures == 0 ? 0 : 1);
    }

    private static void check(String name, Object found, Object wanted) {
        if (!Objects.equals(found, wanted)) {
            failures += 1;
            System.out.println(name + ":\n  found  " + found + "\n  wanted " + wanted);
        }
    }

    // --- Records as the vectors have them ---------------------------------------------------------

    private static byte[] bytes(JsonNode given) throws IOException {
        if (given.isNull()) {
            return null;
        }
        return given.isObject()
                ? given.get("base64").binaryValue()
                : given.textValue().getBytes(StandardCharsets.UTF_8);
    }

    private static Headers headers(JsonNode pairs) throws IOException {
        Headers headers = new RecordHeaders();
        for (JsonNode pair : pairs) {
            headers.add(pair.get(0).textValue(), bytes(pair.get(1)));
        }
        return headers;
    }

    private static ConsumerRecord<byte[], byte[]> received(JsonNode given) throws IOException {
        return new ConsumerRecord<>(
                given.get("topic").textValue(),
                given.path("partition").asInt(),
                given.path("offset").asLong(),
                given.has("timestamp") ? milliseconds(given.get("timestamp")) : 0,
                TimestampType.CREATE_TIME,
                0,
                0,
                bytes(given.get("key")),
                bytes(given.get("value")),
                headers(given.get("headers")),
                Optional.empty());
    }

    private static long milliseconds(JsonNode moment) {
        return OffsetDateTime.parse(moment.textValue()).toInstant().toEpochMilli();
    }

    private static List<Object> comparable(JsonNode record) throws IOException {
        if (record.isNull()) {
            return null;
        }
        String topic = record.get("topic").textValue();
        byte[] key = bytes(record.get("key"));
        byte[] value = bytes(record.get("value"));
        return comparable(
                new ProducerRecord<>(topic, null, key, value, headers(record.get("headers"))));
    }

    /** What two records are compared by: values in JSON as what they mean, headers in no order. */
    private static List<Object> comparable(ProducerRecord<byte[], byte[]> record) {
        if (record == null) {
            return null;
        }
        var headers = new TreeMap<String, String>();
        record.headers().forEach(one -> headers.merge(one.key(), hex(one.value()), String::concat));
        Object body;
        try {
            body = JSON.readTree(record.value());
        } catch (IOException error) {
            body = hex(record.value());
        }
        return List.of(record.topic(), hex(record.key()), headers, body);
    }

    private static String hex(byte[] value) {
        return value == null ? "null" : HexFormat.of().formatHex(value);
    }

    // --- Reading ----------------------------------------------------------------------------------

    private static JsonNode read(String kind, JsonNode given) throws IOException {
        var record = received(given);
        try {
            return switch (kind) {
                case "event" -> readEvent(record);
                case "kdlq" -> counters(record);
                default -> readJob(record);
            };
        } catch (Kjo.Refused refused) {
            return JSON.createObjectNode().put("refused", refused.reason);
        }
    }

    private static JsonNode readJob(ConsumerRecord<byte[], byte[]> record)
            throws Kjo.Refused, IOException {
        Kjo.Job job = Kjo.readJob(record);
        ObjectNode found = JSON.createObjectNode();
        found.put("id", job.id()).put("type", job.type()).put("job_id", job.jobId());
        found.put("service", job.service()).put("generation", job.generation());
        found.put("attempt", job.attempt()).put("replay_count", job.replayCount());
        found.put("content_type", job.contentType()).set("arguments", job.arguments());
        return normal(found);
    }

    private static JsonNode readEvent(ConsumerRecord<byte[], byte[]> record)
            throws Kjo.Refused, IOException {
        var found = Kjo.readEvent(record, Map.of("USER_RENAMED", List.of("1")));
        if (found.isEmpty()) {
            return JSON.createObjectNode().put("passed_over", true);
        }
        return normal(found.get().deepCopy().put("key", Kjo.key(found.get())));
    }

    private static JsonNode counters(ConsumerRecord<byte[], byte[]> record) {
        ObjectNode found = JSON.createObjectNode();
        for (String name : List.of("KDLQ_Redelivered", "KDLQ_Kills")) {
            found.put(name, Kjo.counter(record.headers(), name));
        }
        return found;
    }

    /** As it is read from a text: an int and a long of one value differ for Jackson. */
    private static JsonNode normal(JsonNode found) throws IOException {
        return JSON.readTree(found.toString());
    }

    private static JsonNode expected(JsonNode vector) {
        JsonNode message = vector.path("message");
        ObjectNode refused = JSON.createObjectNode();
        if (message.path("content_type").asText().equals("application/msgpack")) {
            // A reader may leave out MessagePack; to it that is a content type it does not know.
            return refused.put("refused", "deserialization");
        }
        if (vector.has("error")) {
            return refused.set("refused", vector.get("error").get("reason"));
        }
        return message;
    }

    // --- Writing ----------------------------------------------------------------------------------

    private static Optional<Kjo.Decision> written(String kind, JsonNode vector)
            throws IOException, Kjo.Refused {
        return switch (kind) {
            case "job" -> isOfAnotherService(vector) ? sent(writeJob(vector)) : Optional.empty();
            case "event" -> vector.has("given") ? sent(writeEvent(vector)) : Optional.empty();
            case "kdlq" -> vector.has("given") ? Optional.of(decide(vector)) : Optional.empty();
            default -> Optional.empty();
        };
    }

    private static Optional<Kjo.Decision> sent(ProducerRecord<byte[], byte[]> record) {
        return Optional.of(new Kjo.Decision(Kjo.Status.OK, record));
    }

    /** Whether a service that stores no jobs sends this: each header once, none of a stored job's. */
    private static boolean isOfAnotherService(JsonNode vector) {
        JsonNode message = vector.path("message");
        if (!vector.get("conforms").asBoolean() || !message.path("job_id").isNull()) {
            return false;
        }
        Set<String> names = new HashSet<>();
        vector.get("record").get("headers").forEach(pair -> names.add(pair.get(0).textValue()));
        return names.size() == vector.get("record").get("headers").size()
                && message.get("service").textValue().isEmpty()
                && message.get("generation").asInt() == 1
                && message.get("attempt").asInt() == 1
                && message.get("replay_count").asInt() == 0;
    }

    private static ProducerRecord<byte[], byte[]> writeJob(JsonNode vector) throws IOException {
        JsonNode message = vector.get("message");
        JsonNode record = vector.get("record");
        var job =
                Kjo.job(
                        record.get("topic").textValue(),
                        record.get("key").textValue(),
                        message.get("id").textValue(),
                        message.get("type").textValue(),
                        message.get("arguments"));
        for (var header : headers(record.get("headers"))) {
            if (!ENVELOPE.contains(header.key())) {
                job.headers().add(header);
            }
        }
        return job;
    }

    private static ProducerRecord<byte[], byte[]> writeEvent(JsonNode vector) throws Kjo.Refused {
        JsonNode given = vector.get("given");
        @SuppressWarnings("unchecked")
        Map<String, ?> event = JSON.convertValue(given.get("event"), Map.class);
        var record = Kjo.event(given.get("topic").textValue(), event);
        for (var header : given.path("headers").properties()) {
            byte[] value = header.getValue().textValue().getBytes(StandardCharsets.UTF_8);
            record.headers().add(header.getKey(), value);
        }
        return record;
    }

    private static Kjo.Decision decide(JsonNode vector) throws IOException {
        JsonNode given = vector.get("given");
        JsonNode config = given.get("config");
        var ours =
                new Kjo.Config(
                        given.get("consumer").textValue(),
                        config.path("redelivery_topic").textValue(),
                        config.get("dlq_topic").textValue(),
                        config.path("max_redeliveries").asInt(-1),
                        config.path("max_kills").asInt(-1),
                        config.path("informational_headers").asBoolean());
        Kjo.Failure failure = null;
        if (given.has("error")) {
            String name = "kjo_django.exceptions.PermanentError";
            failure = new Kjo.Failure(name, given.get("error").textValue());
        }
        var answer = Kjo.Answer.valueOf(given.get("answer").textValue());
        long now = milliseconds(given.get("now"));
        return Kjo.decide(received(given.get("record")), answer, ours, failure, now);
    }
}
