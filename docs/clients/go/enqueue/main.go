// go run ./enqueue TOPIC_OF_JOBS TOPIC_OF_EVENTS ORDER
package main

import (
	"context"
	"log"
	"os"

	"example.com/kjo"
)

func main() {
	jobs, events, order := os.Args[1], os.Args[2], os.Args[3]
	client := must(kjo.Connect())
	defer client.Close()
	mail := must(kjo.NewJob(jobs, order, "mail-"+order, "shop.mail", map[string]any{"order": order}))
	paid := must(kjo.NewEvent(events, kjo.Event{
		ID: "paid-" + order, Type: "ORDER_PAID", Source: "checkout",
		Data: map[string]any{"userId": "u7", "order": order},
	}))
	if err := client.ProduceSync(context.Background(), mail, paid).FirstErr(); err != nil {
		log.Fatal(err)
	}
}

func must[T any](value T, err error) T {
	if err != nil {
		log.Fatal(err)
	}
	return value
}
